"""Two pools with engines of some models, one host tier, and the ways to make room in them."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec.structs import replace

from appliance.engines.protocol import KvExhausted, SequenceSpec
from appliance.memory.arena import POISON, Arena, PoolExhausted
from appliance.memory.host_tier import HostTier
from appliance.memory.ledger import HostLedger
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferCancelled
from appliance.memory.vmm_host import HostVmm
from appliance.vocabulary import Task
from benchmarks.endurance.memory.fragmentation import Fragmentation
from benchmarks.endurance.memory.kinds import Served
from benchmarks.endurance.memory.texts import CONTEXT, Text, end_of

if TYPE_CHECKING:
    from appliance.engines.vllm.engine import VllmEngine

T = TypeVar("T")

BATCH: Final = 8


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
    """There is no room, and nothing left that could give some up."""


class Pools:
    """The models, the requests that have begun, and the dice. Sizes are bytes."""

    def __init__(
        self,
        models: Sequence[Served],
        generator: random.Random,
        pool_bytes: int,
        slab_bytes: int,
    ) -> None:
        from appliance.engines.vllm.engine import VllmEngine

        self.counts: Counter[str] = Counter()
        self.stuck = 0
        """Operations for which there was no room."""
        self.device_use, self.host_use = Fragmentation(), Fragmentation()
        self._dice = generator
        self._slab_bytes = slab_bytes
        self._jobs: dict[str, Job] = {}
        self._giving: list[tuple[Swapper, Transfer, tuple[int, ...]]] = []
        """Places of the host tier that are free once a transfer is over."""

        self.instances = [Instance(*_pool(pool_bytes, slab_bytes)) for _ in range(2)]
        largest = max(_file_bytes(model.path) for model in models)
        host_bytes = 4 * largest + (24 << 20)
        host_bytes -= host_bytes % slab_bytes
        self.host = HostTier.create(host_bytes)
        self.ledger = HostLedger(host_bytes, slab_bytes, (16 << 20) // slab_bytes)
        self.images: dict[str, tuple[int, ...]] = {}
        for instance in self.instances:
            for model in models:
                instance.engines[model.name] = VllmEngine.build(
                    model.name,
                    str(model.path),
                    dtype=model.dtype,
                    task=model.task,
                    max_context=CONTEXT,
                    max_batch=BATCH,
                    arena=instance.arena,
                    host=self.host,
                    swapper=instance.swapper,
                    adapters=(model.adapter,) if model.adapter else (),
                    speculation=model.drafts,
                )
        self.models = [model.name for model in models]
        self._drafting = [model.name for model in models if model.drafts]
        self._adapted = [model.name for model in models if model.adapter]
        self._embedding = [model.name for model in models if model.task is Task.EMBED]
        self._ends = {m.name: end_of(m.path) for m in models if m.task is Task.GENERATE}
        engines = self.instances[0].engines
        self._weight_bytes = sum(e.weight_slabs * slab_bytes for e in engines.values())
        self._shapes = {
            name: f"{engine.kv.block_bytes // 1024} KiB"
            for name, engine in engines.items()
            if engine.kv.blocks(1)  # an encoder keeps none
        }
        self._poison(range(0, host_bytes, slab_bytes), slab_bytes)
        self._count_hits()

    def _add(self, job: Job) -> None:
        job.instance.engines[job.model].add(
            SequenceSpec(
                request=job.name,
                model=job.model,
                prompt=job.text.prompt,
                output=tuple(job.output),
                body=self._body(job),
            )
        )

    def _body(self, job: Job) -> bytes:
        """What a front end would say of the request."""
        from vllm import PoolingParams, SamplingParams
        from vllm.lora.request import LoRARequest

        from appliance.checkpoints.adapters import full_name
        from appliance.engines.vllm.messages import decode_request, encode_params, encode_request

        if job.model in self._embedding:
            return encode_params(PoolingParams(task="embed"))
        params = SamplingParams(max_tokens=job.limit, temperature=0.0)
        params.update_from_generation_config({}, self._ends[job.model])
        body = encode_params(params)
        if not job.text.adapter:
            return body
        self.counts["prompt of an adapter"] += 1
        named = LoRARequest(full_name(job.model, job.text.adapter), 1, "/nowhere")
        return encode_request(replace(decode_request(body), lora_request=named))

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
        """What is on its way out first; then prefix cache, weights or KV of another request."""
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
            for model, shape in self._shapes.items():
                used, there = use.get(shape, (0, 0))
                pool = instance.engines[model]._cache.pool
                use[shape] = used + pool.held_bytes, there + pool.mapped_bytes
        self.device_use.look(use)
        host = {f"{size // 1024} KiB": both for size, both in self.ledger.kv_use().items()}
        self.host_use.look(host)

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
        """Nothing may read this any more."""
        for place in places:
            self.host.view(place, nbytes)[:] = bytes([POISON]) * nbytes

    def _count_hits(self) -> None:
        """Have prompts counted that found a prefix in the cache."""
        for instance in self.instances:
            for engine in instance.engines.values():
                scheduler = engine._scheduler
                scheduler.hold = self._counting(scheduler.hold)  # type: ignore[method-assign]

    def _counting(self, hold: Callable[..., int]) -> Callable[..., int]:
        def counting(request: Any, tokens: int, max_slabs: int, prompts: Any) -> int:
            cached = hold(request, tokens, max_slabs, prompts)
            if cached and prompts is not None:
                self.counts["prefix found by a prompt"] += 1
            return cached

        return counting


def _file_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _pool(pool_bytes: int, slab_bytes: int) -> tuple[Arena, Swapper]:
    arena = Arena(HostVmm(pool_bytes // slab_bytes, slab_bytes), poison=True)
    return arena, Swapper(arena.vmm.stream)
