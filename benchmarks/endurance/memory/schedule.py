"""A random schedule on two pools: every token is compared, every book has to balance."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from appliance.demo.checkpoints import make_checkpoints
from appliance.engines.protocol import Produced
from appliance.memory.arena import PoolExhausted
from appliance.vocabulary import Task
from benchmarks.endurance.memory.kinds import Served, make_kinds
from benchmarks.endurance.memory.pools import BATCH, Instance, Job, Pools, Stuck
from benchmarks.endurance.memory.texts import LONGEST, RECIPES, STEM, Text, answered
from benchmarks.endurance.memory.vectors import equal

LIVE: Final = 40
"""Requests at a time at most."""

KINDS: Final = (
    "prefill",
    "prefill during the load",
    "prefix found by a prompt",
    "prefix found by a swap in",
    "turn",
    "load beside a turn",
    "load cancelled",
    "load from the files",
    "load from the master image",
    "swap out",
    "swap in",
    "swap in behind its own swap out",
    "migration",
    "eviction",
    "trim",
    "room made",
    "waited for KV on its way out",
    "request forgotten",
    "master image dropped",
    "master image filled",
)


class RandomSchedule(Pools):
    """Draws what happens next, and counts it."""

    def __init__(
        self,
        models: Sequence[Served],
        texts: dict[str, list[Text]],
        generator: random.Random,
        pool_bytes: int,
        slab_bytes: int,
    ) -> None:
        super().__init__(models, generator, pool_bytes, slab_bytes)
        self.finished: Counter[str] = Counter()
        self.tokens = 0
        self.steps = 0
        self.mismatches: list[dict[str, object]] = []
        self.vectors = 0
        self.wrong_vectors: list[dict[str, object]] = []
        self._texts = texts
        self._stems: dict[str, tuple[int, ...]] = {}
        """How the last prompt began that was chosen freely, by model."""
        self._asked = 0
        self._seconds = 0.0

    def run(self, seconds: float, operations: int | None) -> None:
        """So many operations, or as many as the time allows."""
        choices: dict[Callable[[Instance], None], int] = {
            self._prefill: 18,
            self._turn: 30,
            self._swap_out: 8,
            self._swap_in: 10,
            self._bounce: 3,
            self._migrate: 8,
            self._prefetch: 4,
            self._evict: 4,
            self._trim: 3,
            self._forget: 2,
            self._drop_master: 1,
            self._fill_master: 2,
        }
        began = time.monotonic()
        done = 0
        while done < operations if operations else time.monotonic() - began < seconds:
            operation = self._dice.choices(list(choices), list(choices.values()))[0]
            operation(self._dice.choice(self.instances))
            self._look_around()
            done += 1
            if done % 50 == 0:
                self._check()
        self.counts["operation"] = done
        self._seconds = time.monotonic() - began

    def finish(self) -> None:
        """Let everything that runs come to its end; nothing is left then."""
        while self._jobs:
            job = next(iter(self._jobs.values()))
            if not job.resident:
                assert self._bring_back(job), (
                    f"no other request is left, and {job.name} has no room"
                )
            names = [job.name]
            while job.name in self._jobs and job.resident:
                self._bring(job.instance, job.model, [job]).wait()
                self._accept(self._step(job.instance, job.model, [job], names))
        for instance in self.instances:
            for model in list(instance.loads):
                self._give_up_weights(instance, model)
            instance.swapper.settle()
            for engine in instance.engines.values():
                engine.trim(0)
        self._look_around()
        for model in list(self.images):
            self._drop(model)
        self._check()

    def complaints(self) -> list[str]:
        """What is not as it has to be."""
        found = [f"wrong token: {mismatch}" for mismatch in self.mismatches]
        found += [f"wrong vector: {one}" for one in self.wrong_vectors]
        found += [f"never happened: {kind}" for kind in KINDS if not self.counts[kind]]
        found += [f"never finished: {name}" for name in self.models if not self.finished[name]]
        if self._adapted and not self.counts["prompt of an adapter"]:
            found.append("never happened: prompt of an adapter")
        found += [f"no draft was right: {m}" for m, use in self._drafts().items() if not use[1]]
        for number, instance in enumerate(self.instances):
            if instance.swapper.pending:
                found.append(f"instance {number}: {instance.swapper.pending} transfers are pending")
            if instance.arena.free != instance.arena.slabs:
                found.append(f"instance {number}: slabs are not free: {instance.arena.usage()}")
            for model, engine in instance.engines.items():
                if engine._scheduler.requests or engine._runner.requests:
                    found.append(f"instance {number}: {model} still knows requests")
        if self.ledger.free_slabs != self.ledger.total_slabs:
            lost = self.ledger.total_slabs - self.ledger.free_slabs
            found.append(f"host tier: {lost} slabs are not free")
        return found

    def report(self) -> dict[str, object]:
        """What happened."""
        pool = self.instances[0].arena
        return {
            "seconds": round(self._seconds, 1),
            "slab_bytes": self._slab_bytes,
            "pool_bytes": pool.slabs * pool.slab_bytes,
            "weight_bytes": self._weight_bytes,
            "pool_by_weights": round(pool.slabs * pool.slab_bytes / self._weight_bytes, 3),
            "host_bytes": self.host.nbytes,
            "pool_high_water": [i.arena.high_water / i.arena.slabs for i in self.instances],
            "kv_shapes": self._shapes,
            "operations": {k: self.counts[k] for k in ("operation", *KINDS)},
            "prompts_of_adapters": self.counts["prompt of an adapter"],
            "tokens_drafted_and_accepted": self._drafts(),
            "steps": self.steps,
            "requests_finished": dict(self.finished),
            "tokens_compared": self.tokens,
            "tokens_wrong": len(self.mismatches),
            "vectors_compared": self.vectors,
            "vectors_wrong": len(self.wrong_vectors),
            "deferred": self.stuck,
            "fragmentation_device": self.device_use.report(),
            "fragmentation_host": self.host_use.report(),
        }

    def _drafts(self) -> dict[str, tuple[int, int]]:
        """Tokens that were drafted, and those of them that were right, by model."""
        uses = {
            model: [instance.engines[model].draft_use() for instance in self.instances]
            for model in self._drafting
        }
        return {
            model: (sum(use.drafted for use in both), sum(use.accepted for use in both))
            for model, both in uses.items()
        }

    def _prefill(self, instance: Instance) -> None:
        """A new request; often the model's weights are still on their way."""
        if len(self._jobs) >= LIVE:
            return
        # Half of the time a model that is here, and something like what it was asked before.
        here = list(instance.loads)
        model = self._dice.choice(here if here and self._dice.random() < 0.5 else self.models)
        if self._dice.random() < 0.5:
            text = self._dice.choice(self._texts[model])
            self._stems[model] = text.prompt[:STEM]
        else:
            akin = [t for t in self._texts[model] if t.prompt[:STEM] == self._stems.get(model)]
            text = self._dice.choice(akin or self._texts[model])
        self._asked += 1
        job = Job(f"r{self._asked}", model, text, self._dice.randint(1, LONGEST), instance)
        engine = instance.engines[model]
        try:
            transfer = self._bring(instance, model)
        except Stuck:
            self.stuck += 1
            return
        if self._dice.random() < 0.3:
            transfer.wait()
        self._add(job)
        early = not transfer.done
        try:
            cap = self._caps(engine)
            produced = self._with_room(
                instance, lambda: engine.prefill(job.name, next(cap)), model, []
            )
        except Stuck:
            self.stuck += 1
            engine.forget(job.name)
            return
        finally:
            engine.trim()
        self.counts["prefill"] += 1
        self.counts["prefill during the load"] += early
        if model in self._embedding:
            self._compare(job, produced)
            return
        self._jobs[job.name] = job
        self._accept(produced)

    def _compare(self, job: Job, produced: Iterable[Produced]) -> None:
        """The vector of a prompt, which ends with it."""
        from appliance.engines.vllm.messages import decode_output

        (one,) = produced
        assert one.detail is not None
        found = decode_output(one.detail).pooling_output.reshape(-1).tolist()
        self.vectors += 1
        if equal(found, job.text.vector):
            self.finished[job.model] += 1
        else:
            self.wrong_vectors.append(
                {"request": job.name, "model": job.model, "prompt": list(job.text.prompt)}
            )

    def _turn(self, instance: Instance) -> None:
        """Some steps of some requests of a model; another model may come in beside them."""
        models = sorted({job.model for job in self._residents(instance)})
        if not models:
            return
        model = self._dice.choice(models)
        mine = [job for job in self._residents(instance) if job.model == model]
        batch = self._dice.sample(mine, min(len(mine), self._dice.randint(1, BATCH)))
        try:
            self._bring(instance, model, batch)
        except Stuck:
            self.stuck += 1
            return
        steps = self._dice.randint(1, 24)
        when = self._dice.randrange(2 * steps)
        cancelled = self._dice.random() < 0.3
        beside: str | None = None
        names = [job.name for job in batch]
        self.counts["turn"] += 1
        for number in range(steps):
            if number == when:
                beside = self._load_beside(instance, model)
                if beside is not None and cancelled:
                    self._give_up_weights(instance, beside)
            try:
                produced = self._step(instance, model, batch, names)
            except Stuck:
                self.stuck += 1
                break
            self._accept(produced)
            if any(job.name not in self._jobs for job in batch):
                batch = [job for job in batch if job.name in self._jobs]
                names = [job.name for job in batch]
            self._look_around()
            if not batch:
                break
        instance.engines[model].trim()

    def _load_beside(self, instance: Instance, model: str) -> str | None:
        """Begin to load another model while this one steps, if there is room without KV giving
        way."""
        others = [m for m in self.models if m != model and m not in instance.loads]
        if not others:
            return None
        other = self._dice.choice(others)
        while True:
            try:
                self._begin(instance, other)
                break
            except PoolExhausted:
                idle = [m for m in instance.loads if m != model]
                if not idle:
                    return None
                self._evict_one(instance, self._dice.choice(idle))
        self.counts["load beside a turn"] += 1
        return other

    def _prefetch(self, instance: Instance) -> None:
        """Load a model without a request for it; now and then the load is cancelled."""
        others = [model for model in self.models if model not in instance.loads]
        if not others:
            return
        model = self._dice.choice(others)
        try:
            self._bring(instance, model)
        except Stuck:
            self.stuck += 1
            return
        if self._dice.random() < 0.5:
            self._give_up_weights(instance, model)

    def _swap_out(self, instance: Instance) -> None:
        jobs = self._residents(instance)
        if jobs:
            self._send_out(self._dice.choice(jobs))

    def _swap_in(self, instance: Instance) -> None:
        jobs = [job for job in self._jobs.values() if job.instance is instance and job.places]
        if jobs:
            self._bring_back(self._dice.choice(jobs))

    def _bounce(self, instance: Instance) -> None:
        """Out and at once in again: the one reads what the other still writes."""
        jobs = self._residents(instance)
        if jobs and self._send_out(job := self._dice.choice(jobs)):
            self._bring_back(job)

    def _migrate(self, instance: Instance) -> None:
        """A request changes instance. Its KV is in the host tier by then."""
        jobs = [job for job in self._jobs.values() if job.instance is instance]
        if not jobs:
            return
        job = self._dice.choice(jobs)
        if job.resident and not self._send_out(job):
            return
        if job.leaving is not None:
            instance.swapper.settle([job.leaving])
            job.leaving = None
        engine = instance.engines[job.model]
        engine.forget(job.name)
        engine.trim()
        (job.instance,) = (other for other in self.instances if other is not instance)
        self._add(job)
        if self._bring_back(job):
            self.counts["migration"] += 1

    def _evict(self, instance: Instance) -> None:
        if instance.loads:
            self._evict_one(instance, self._dice.choice(list(instance.loads)))

    def _trim(self, instance: Instance) -> None:
        """Give up prefix cache for nothing."""
        cold = [engine for engine in instance.engines.values() if engine._cache.pool.cold_slabs]
        if cold:
            self.counts["trim"] += 1
            self._dice.choice(cold).trim(0)

    def _forget(self, instance: Instance) -> None:
        """A client hangs up, in whatever state its request is."""
        jobs = [job for job in self._jobs.values() if job.instance is instance]
        if jobs:
            self.counts["request forgotten"] += 1
            self._drop_job(self._dice.choice(jobs))

    def _drop_master(self, instance: Instance) -> None:
        if self.images:
            self._drop(self._dice.choice(list(self.images)))

    def _fill_master(self, instance: Instance) -> None:
        """One instance writes the image, the other takes it over."""
        missing = [model for model in self.models if model not in self.images]
        if not missing:
            return
        model = self._dice.choice(missing)
        slabs = instance.engines[model].host_slabs
        while (places := self.ledger.take_weights(model, slabs)) is None:
            if not self.images:
                return
            self._drop(self._dice.choice(list(self.images)))
        self.images[model] = places
        for each in self.instances:
            self._give_up_weights(each, model)
        for each in sorted(self.instances, key=lambda each: each is not instance):
            each.engines[model].store_weights(places, fill=each is instance)
        self.counts["master image filled"] += 1

    def _step(
        self, instance: Instance, model: str, batch: Collection[Job], names: list[str]
    ) -> list[Produced]:
        """One token of each; raises `Stuck`."""
        engine = instance.engines[model]
        cap = self._caps(engine)
        self.steps += 1
        return self._with_room(instance, lambda: engine.step(names, next(cap)), model, batch)

    def _accept(self, produced: Iterable[Produced]) -> None:
        """Compare tokens; drop requests that are wrong or done."""
        wrong: set[str] = set()
        for one in produced:
            if one.request in wrong:  # a draft gives several tokens
                continue
            job = self._jobs[one.request]
            expected = job.text.answer[: job.limit]
            place = len(job.output)
            job.output.append(one.token)
            self.tokens += 1
            right = tuple(job.output[place:]) == expected[place : place + 1]
            ended = len(job.output) == len(expected)
            if not right or ended != (one.finished is not None):
                self.mismatches.append(
                    {
                        "request": job.name,
                        "model": job.model,
                        "prompt": list(job.text.prompt),
                        "place": place,
                        "expected": list(expected),
                        "output": list(job.output),
                        "finished": str(one.finished),
                    }
                )
                wrong.add(job.name)
                self._drop_job(job)
            elif ended:
                self.finished[job.model] += 1
                del self._jobs[job.name]


def described(models: Sequence[Served]) -> str:
    """What is run, and what of it is compared with plain vLLM."""
    tasks = {model.task for model in models}
    made = {Task.GENERATE: "tokens", Task.EMBED: "vectors"}
    compared = " and ".join([word for task, word in made.items() if task in tasks])
    return f"{len(models)} models on two pools, a random schedule, {compared} compared"


def endure(
    seed: int,
    seconds: float,
    operations: int | None,
    pool_bytes: int,
    slab_bytes: int,
    families: int,
    *,
    kinds: bool = False,
) -> dict[str, object]:
    """Run the schedule, in a process that vLLM's environment was prepared for; what happened. With
    `kinds`, small checkpoints of published models are among the models."""
    with tempfile.TemporaryDirectory() as directory:
        models = make_kinds(Path(directory)) if kinds else []
        models += map(Served, make_checkpoints(Path(directory), recipes=RECIPES))
        generator = random.Random(seed)
        texts, dropped = answered(models, generator, families)
        schedule = RandomSchedule(models, texts, generator, pool_bytes, slab_bytes)
        schedule.run(seconds, operations)
        schedule.finish()
    return {
        "what": described(models),
        "seed": seed,
        **schedule.report(),
        "prompts_left_out": dropped,
        "complaints": schedule.complaints(),
    }
