"""Minutes of a random life: six models on two small pools, every token compared with plain vLLM's.

    python benchmarks/soak.py [--minutes 10] [--seed 1] [--slab 16KiB] [--json FILE]

Six models with four shapes of KV cache, each on two instances in this process: two pools that hold
about a third of the weights each, one host tier that holds four of the six master images. One
seeded generator draws what happens next: prompts (many share prefixes) on either instance, turns
of random batches, KV out, in, and to the other instance, loads beside a turn, loads that are
cancelled or that a prompt overtakes, trims, evictions, requests forgotten, master images dropped
and filled again. A request stays until it ends; whoever needs room takes it from others.

Memory holds NaN wherever nothing was written: slabs when they are mapped, places of the host tier
when they are given back. So what is read too early, or too late, shows in the tokens.

Fragmentation is Aegaeon's (§7.3, figure 16), unused by peak allocated memory, looked at after every
step and averaged over time. Unused is what is mapped, but not by a block in use or in the prefix
cache. Exit status 1: a token was wrong, something was lost, or something never happened.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

from appliance.demo.checkpoints import EOS_ID, Recipe, make_checkpoints
from appliance.engines.protocol import KvExhausted, Produced, SequenceSpec
from appliance.engines.vllm import prepare_environment
from appliance.memory.arena import POISON, Arena, PoolExhausted
from appliance.memory.host_tier import HostTier
from appliance.memory.ledger import HostLedger
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferCancelled
from appliance.memory.vmm_host import HostVmm
from appliance.units import Bytes
from benchmarks.provenance import made_on_cpu

if TYPE_CHECKING:
    from appliance.engines.vllm.engine import VllmEngine

T = TypeVar("T")

CONTEXT: Final = 512
LONGEST: Final = 64
"""Tokens of an answer at most."""
BATCH: Final = 8
MEMBERS: Final = 5
"""Prompts of a family, which share a stem."""
STEM: Final = 20
"""Tokens that tell families apart."""
VOCABULARY: Final = range(6, 2048)
LIVE: Final = 40
"""Requests at a time at most."""

# Six models, four shapes of a block: 256, 320, 288 and 128 KiB.
RECIPES: Final = tuple(
    Recipe(
        name=name,
        family=family,
        layers=4,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seed=70 + seed,
    )
    for seed, (name, family, hidden, intermediate, heads, kv_heads, head_dim) in enumerate(
        (
            ("llama-4x64", "llama", 128, 256, 4, 4, 64),
            ("qwen3-4x64", "qwen3", 128, 320, 4, 4, 64),
            ("llama-10x32", "llama", 120, 256, 10, 10, 32),
            ("llama-3x96", "llama", 144, 288, 3, 3, 96),
            ("qwen2-2x64", "qwen2", 128, 320, 2, 2, 64),
            ("qwen3-1x128", "qwen3", 128, 256, 2, 1, 128),
        )
    )
)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--operations", type=int, help="end after so many, whatever the time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slab", type=Bytes.read, default="16KiB")
    parser.add_argument("--pool", type=Bytes.read, default="12MiB")
    parser.add_argument("--families", type=int, default=12, help="of prompts, for each model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    told = made_on_cpu()
    prepare_environment("auto")
    with tempfile.TemporaryDirectory() as directory:
        paths = make_checkpoints(Path(directory), recipes=RECIPES)
        generator = random.Random(options.seed)
        texts, dropped = answered(paths, generator, options.families)
        soak = Soak(paths, texts, generator, options.pool, options.slab)
        soak.run(options.minutes * 60, options.operations)
        soak.finish()
    complaints = soak.complaints()
    result = {
        **told,
        "what": "six models of four KV shapes on two pools, a random schedule, tokens compared",
        "seed": options.seed,
        **soak.report(),
        "prompts_left_out": dropped,
        "complaints": complaints,
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    raise SystemExit(1 if complaints else 0)


# --- what is asked, and what plain vLLM says to it ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, and what plain vLLM adds to it: `LONGEST` tokens, or up to its end token."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def answered(
    paths: Sequence[Path], generator: random.Random, families: int
) -> tuple[dict[str, list[Text]], dict[str, int]]:
    """Prompts of every model with their answers; how many were left out.

    Every prompt is asked twice, in other company the second time. Where plain vLLM does not agree
    with itself two tokens are as good as equally likely, and nothing can be compared.
    """
    prompts = {path.name: _prompts(generator, families) for path in paths}
    orders = {name: generator.sample(range(len(p)), len(p)) for name, p in prompts.items()}
    task = {
        "checkpoints": [
            {
                "path": str(path),
                "max_context": CONTEXT,
                "prompts": [
                    {"tokens": prompts[path.name][number], "max_tokens": LONGEST}
                    for number in (*range(len(prompts[path.name])), *orders[path.name])
                ],
            }
            for path in paths
        ]
    }
    done = subprocess.run(
        [sys.executable, "-m", "appliance.engines.vllm.reference"],
        input=json.dumps(task).encode(),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"plain vLLM failed:\n{done.stderr.decode(errors='replace')[-4000:]}")
    texts: dict[str, list[Text]] = {}
    dropped: dict[str, int] = {}
    for name, answered in zip(prompts, json.loads(done.stdout), strict=True):
        answers = [answer["tokens"] for answer in answered]
        count = len(prompts[name])
        again = dict(zip(orders[name], answers[count:], strict=True))
        texts[name] = [
            Text(prompt, tuple(answer))
            for number, (prompt, answer) in enumerate(
                zip(prompts[name], answers[:count], strict=True)
            )
            if again[number] == answer
        ]
        dropped[name] = count - len(texts[name])
    return texts, dropped


def _prompts(generator: random.Random, families: int) -> list[tuple[int, ...]]:
    """Families of prompts: a stem, and the stem with something behind it."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(families):
        stem = tuple(generator.choices(VOCABULARY, k=generator.randint(STEM, 128)))
        prompts.append(stem)
        for _ in range(MEMBERS - 1):
            prompts.append(stem + tuple(generator.choices(VOCABULARY, k=generator.randint(1, 40))))
    return prompts


# --- who is where ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Job:
    """A request that has begun: its KV is on its instance's device, or at places on the host."""

    name: str
    model: str
    text: Text
    limit: int
    instance: Instance
    output: list[int] = field(default_factory=list)
    places: tuple[int, ...] = ()
    leaving: Transfer | None = None

    @property
    def resident(self) -> bool:
        return not self.places

    @property
    def computed(self) -> int:
        """Tokens whose KV there is."""
        return len(self.text.prompt) + len(self.output) - 1


@dataclass(slots=True, eq=False)
class Instance:
    """One pool with an engine for every model."""

    arena: Arena
    swapper: Swapper
    engines: dict[str, VllmEngine] = field(default_factory=dict)
    loads: dict[str, Transfer] = field(default_factory=dict)
    """Of the models that have slabs for their weights."""
    leaving: deque[tuple[VllmEngine, Transfer]] = field(default_factory=deque)


class Stuck(Exception):
    """There is no room, and nobody left to take it from."""


class Fragmentation:
    """Unused memory by shape, looked at again and again. Sizes are bytes, times seconds."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._unused: dict[str, int] = {}
        self._allocated: dict[str, int] = {}
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._allocated_sums: defaultdict[str, float] = defaultdict(float)
        self._worst: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()

    def look(self, shapes: dict[str, tuple[int, int]]) -> None:
        """Used and allocated bytes of every shape, from now on."""
        now = time.monotonic()
        for shape, unused in self._unused.items():
            self._sums[shape] += unused * (now - self._last)
            self._allocated_sums[shape] += self._allocated[shape] * (now - self._last)
        self._last = now
        self._unused = {shape: there - used for shape, (used, there) in shapes.items()}
        self._allocated = {shape: there for shape, (_, there) in shapes.items()}
        self._unused["overall"] = sum(self._unused.values())
        self._allocated["overall"] = sum(self._allocated.values())
        for shape, unused in self._unused.items():
            self._worst[shape] = max(self._worst[shape], unused)
            self._peaks[shape] = max(self._peaks[shape], self._allocated[shape])

    def report(self) -> dict[str, dict[str, float]]:
        seconds = self._last - self._began
        return {
            shape: {
                "peak_allocated_bytes": peak,
                "unused_by_peak_mean": round(self._sums[shape] / seconds / peak, 5),
                "unused_by_peak_worst": round(self._worst[shape] / peak, 5),
                "unused_by_allocated_mean": round(
                    self._sums[shape] / max(self._allocated_sums[shape], 1e-9), 5
                ),
            }
            for shape, peak in sorted(self._peaks.items())
            if peak
        }


class Soak:
    """The models, the requests, and the dice."""

    def __init__(
        self,
        paths: Sequence[Path],
        texts: dict[str, list[Text]],
        generator: random.Random,
        pool_bytes: int,
        slab_bytes: int,
    ) -> None:
        from appliance.engines.vllm.engine import VllmEngine

        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.tokens = 0
        self.steps = 0
        self.mismatches: list[dict[str, object]] = []
        self.stuck = 0
        self._texts = texts
        self._dice = generator
        self._slab_bytes = slab_bytes
        self._stems: dict[str, tuple[int, ...]] = {}
        """How the last prompt began that was chosen freely, by model."""
        self._jobs: dict[str, Job] = {}
        self._asked = 0
        self._giving: list[tuple[Swapper, Transfer, tuple[int, ...]]] = []
        """Places of the host tier that are free once a transfer is over."""
        self._device, self._host_use = Fragmentation(), Fragmentation()
        self._seconds = 0.0

        self.instances = [Instance(*_pool(pool_bytes, slab_bytes)) for _ in range(2)]
        weights = [sum(f.stat().st_size for f in path.glob("*.safetensors")) for path in paths]
        self._weight_bytes = sum(weights)
        host_bytes = 4 * max(weights) + (24 << 20)
        host_bytes -= host_bytes % slab_bytes
        self.host = HostTier.create(host_bytes)
        self.ledger = HostLedger(host_bytes, slab_bytes, (16 << 20) // slab_bytes)
        self.images: dict[str, tuple[int, ...]] = {}
        for instance in self.instances:
            for path in paths:
                instance.engines[path.name] = VllmEngine.build(
                    path.name,
                    str(path),
                    dtype="float32",
                    max_context=CONTEXT,
                    max_batch=BATCH,
                    arena=instance.arena,
                    host=self.host,
                    swapper=instance.swapper,
                )
        self.models = [path.name for path in paths]
        self._shapes = {
            name: f"{engine.kv.block_bytes // 1024} KiB"
            for name, engine in self.instances[0].engines.items()
        }
        self._poison(range(0, host_bytes, slab_bytes), slab_bytes)
        self._count_hits()

    # --- the schedule ----------------------------------------------------------------------------

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
                assert self._bring_back(job), f"nobody is left, and {job.name} has no room"
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
        found += [f"never happened: {kind}" for kind in KINDS if not self.counts[kind]]
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
            "steps": self.steps,
            "requests_finished": dict(self.finished),
            "tokens_compared": self.tokens,
            "tokens_wrong": len(self.mismatches),
            "deferred": self.stuck,
            "fragmentation_device": self._device.report(),
            "fragmentation_host": self._host_use.report(),
        }

    # --- operations ------------------------------------------------------------------------------

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
        self._jobs[job.name] = job
        self._accept(produced)

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
        """Load a model for nobody; now and then it is not wanted after all."""
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
        """Somebody hung up, wherever his request stands."""
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

    # --- their parts -----------------------------------------------------------------------------

    def _add(self, job: Job) -> None:
        from vllm import SamplingParams

        from appliance.engines.vllm.messages import encode_params

        params = SamplingParams(max_tokens=job.limit, temperature=0.0)
        params.update_from_generation_config({}, EOS_ID)
        job.instance.engines[job.model].add(
            SequenceSpec(
                request=job.name,
                model=job.model,
                prompt=job.text.prompt,
                output=tuple(job.output),
                body=encode_params(params),
            )
        )

    def _step(
        self, instance: Instance, model: str, batch: Collection[Job], names: list[str]
    ) -> list[Produced]:
        """One token of each; raises `Stuck`."""
        engine = instance.engines[model]
        cap = self._caps(engine)
        self.steps += 1
        return self._with_room(instance, lambda: engine.step(names, next(cap)), model, batch)

    def _accept(self, produced: Iterable[Produced]) -> None:
        """Compare tokens; who is wrong or done goes."""
        for one in produced:
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
                self._drop_job(job)
            elif ended:
                self.finished[job.model] += 1
                del self._jobs[job.name]

    def _bring(self, instance: Instance, model: str, batch: Collection[Job] = ()) -> Transfer:
        """Have the weights on their way in; raises `Stuck`."""
        return self._with_room(instance, lambda: self._begin(instance, model), model, batch)

    def _begin(self, instance: Instance, model: str) -> Transfer:
        """Begin to load, unless that was done. Raises `PoolExhausted`."""
        transfer = instance.engines[model].begin_load()
        if instance.loads.get(model) is not transfer:
            instance.loads[model] = transfer
            source = "master image" if model in self.images else "files"
            self.counts[f"load from the {source}"] += 1
        return transfer

    def _evict_one(self, instance: Instance, model: str) -> None:
        self.counts["eviction"] += 1
        self._give_up_weights(instance, model)

    def _give_up_weights(self, instance: Instance, model: str) -> None:
        transfer = instance.loads.pop(model, None)
        instance.engines[model].evict_weights()
        if transfer is not None and isinstance(transfer.error, TransferCancelled):
            self.counts["load cancelled"] += 1

    def _send_out(self, job: Job) -> bool:
        """Start to swap a request out; False if the host tier is full."""
        engine = job.instance.engines[job.model]
        places = self.ledger.take_blocks(engine.kv.block_bytes, engine.kv.blocks(job.computed))
        if places is None:
            return False
        job.places = places
        job.leaving = engine.swap_out(job.name, places)
        job.instance.leaving.append((engine, job.leaving))
        self.counts["swap out"] += 1
        return True

    def _bring_back(self, job: Job) -> bool:
        """Start to swap a request in; False if there is no room."""
        instance, engine = job.instance, job.instance.engines[job.model]
        behind = job.leaving is not None and not job.leaving.done
        cap = self._caps(engine)
        try:
            transfer = self._with_room(
                instance,
                lambda: engine.swap_in(job.name, job.places, next(cap)),
                job.model,
                [job],
            )
        except Stuck:
            self.stuck += 1
            return False
        self.counts["swap in"] += 1
        self.counts["swap in behind its own swap out"] += behind
        nbytes = engine.kv.blocks(job.computed) * engine.kv.block_bytes
        self.counts["prefix found by a swap in"] += transfer.nbytes < nbytes
        self._giving.append((instance.swapper, transfer, job.places))
        job.places, job.leaving = (), None
        return True

    def _drop_job(self, job: Job) -> None:
        """Forget a request; its places stay taken while they are still written."""
        del self._jobs[job.name]
        engine = job.instance.engines[job.model]
        engine.forget(job.name)
        engine.trim()
        if job.places and job.leaving is not None:
            self._giving.append((job.instance.swapper, job.leaving, job.places))
        elif job.places:
            self._give_places(job.places)

    def _drop(self, model: str) -> None:
        """The master image goes, and with it the weights that were read from it."""
        for instance in self.instances:
            self._give_up_weights(instance, model)
            instance.engines[model].store_weights((), fill=False)
        self.ledger.give_weights(model)
        self._poison(self.images.pop(model), self._slab_bytes)
        self.counts["master image dropped"] += 1

    def _residents(self, instance: Instance) -> list[Job]:
        return [job for job in self._jobs.values() if job.instance is instance and job.resident]

    # --- room ------------------------------------------------------------------------------------

    def _caps(self, engine: VllmEngine) -> Iterator[int]:
        """Slabs that the model's KV may have: at first sometimes too few, then all."""
        if self._dice.random() < 0.1:
            few = engine.kv.group_slabs * self._dice.randint(0, 2)
            yield engine._cache.pool.mapped_slabs + few
        while True:
            yield engine._cache.pool.geometry.slots

    def _with_room(
        self, instance: Instance, action: Callable[[], T], model: str, batch: Collection[Job]
    ) -> T:
        """Do what needs slabs; others give them up, but not the weights of this model, nor the KV
        of this batch."""
        for attempt in itertools.count():
            try:
                return action()
            except (PoolExhausted, KvExhausted) as error:
                # The first attempt may have been denied what there is (`_caps`).
                if not self._make_room(instance, model, batch) and attempt:
                    raise Stuck from error
        raise AssertionError("there is always another attempt")

    def _out_or_gone(self, job: Job) -> None:
        if not self._send_out(job):
            self.counts["forgotten for want of room on the host"] += 1
            self._drop_job(job)

    def _make_room(self, instance: Instance, model: str, batch: Collection[Job]) -> bool:
        """What is on its way out first; then prefix cache, weights or KV of somebody."""
        if instance.leaving:
            engine, transfer = instance.leaving.popleft()
            instance.swapper.settle([transfer])
            engine.trim()
            self.counts["waited for KV on its way out"] += 1
            return True
        ways: list[Callable[[], object]] = []
        for engine in instance.engines.values():
            if engine._cache.pool.cold_slabs:
                ways.append(partial(engine.trim, 0))
        for other in instance.loads:
            if other != model:
                ways.append(partial(self._evict_one, instance, other))
        for job in self._residents(instance):
            if job not in batch:
                ways.append(partial(self._out_or_gone, job))
        if not ways:
            return False
        self._dice.choice(ways)()
        self.counts["room made"] += 1
        return True

    # --- watching --------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Let go of what is over, and look at the memory."""
        for instance in self.instances:
            instance.swapper.reap()
            for _ in range(len(instance.leaving)):
                engine, transfer = instance.leaving.popleft()
                if instance.swapper.is_over(transfer):
                    engine.trim()
                else:
                    instance.leaving.append((engine, transfer))
        giving, self._giving = self._giving, []
        for swapper, transfer, places in giving:
            if swapper.is_over(transfer):
                self._give_places(places)
            else:
                self._giving.append((swapper, transfer, places))
        for job in self._jobs.values():
            if job.leaving is not None and job.instance.swapper.is_over(job.leaving):
                assert job.leaving.error is None, job.leaving.error
                job.leaving = None
        use: dict[str, tuple[int, int]] = {}
        for instance in self.instances:
            for model, engine in instance.engines.items():
                used, there = use.get(self._shapes[model], (0, 0))
                pool = engine._cache.pool
                use[self._shapes[model]] = used + pool.held_bytes, there + pool.mapped_bytes
        self._device.look(use)
        host = {f"{size // 1024} KiB": both for size, both in self.ledger.kv_use().items()}
        self._host_use.look(host)

    def _check(self) -> None:
        """The books balance, everywhere. Raises `AssertionError` or `LedgerError`."""
        self.ledger.check_integrity()
        for instance in self.instances:
            instance.arena.check_integrity()
            instance.swapper.check_integrity()
            for engine in instance.engines.values():
                engine._cache.pool.check_integrity()

    def _give_places(self, places: tuple[int, ...]) -> None:
        size = self.ledger._run_of[places[0]][0]
        self._poison(places, size)
        self.ledger.give_blocks(places)

    def _poison(self, places: Iterable[int], nbytes: int) -> None:
        """Nobody may read this any more."""
        for place in places:
            self.host.view(place, nbytes)[:] = bytes([POISON]) * nbytes

    def _count_hits(self) -> None:
        """Have prompts counted that found a prefix in the cache."""
        for instance in self.instances:
            for engine in instance.engines.values():
                scheduler = engine._scheduler
                scheduler.hold = self._counting(scheduler.hold)  # type: ignore[method-assign]

    def _counting(self, hold: Callable[..., int]) -> Callable[..., int]:
        def counting(request: Any, tokens: int, max_slabs: int) -> int:
            cached = hold(request, tokens, max_slabs)
            if cached and tokens == request.num_tokens:
                self.counts["prefix found by a prompt"] += 1
            return cached

        return counting


def _pool(pool_bytes: int, slab_bytes: int) -> tuple[Arena, Swapper]:
    arena = Arena(HostVmm(pool_bytes // slab_bytes, slab_bytes), poison=True)
    return arena, Swapper(arena.vmm.stream)


if __name__ == "__main__":
    main()
