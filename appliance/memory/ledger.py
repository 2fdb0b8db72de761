"""Who holds which memory, as the scheduling machine sees it: counts on devices, places on the host.

Pure bookkeeping. A worker enforces the same limits physically (`appliance.memory.arena`); this is
the plan. On every tier ``free + held + in flight == total`` at all times, which
`check_integrity` asserts. That the host tier is full is an answer (``None``); on a device the
machine makes room first, so claiming slabs that are not free is an error.
"""

from __future__ import annotations

from appliance.errors import LedgerError
from appliance.vocabulary import ModelName


class DeviceLedger:
    """Slabs of one instance, by model: weights (in flight while they load) and KV.

    KV counts are caps: what a model may have mapped until the worker reports what it did map.
    All operations are O(1) but `free_slabs`, which is O(models on the device).
    """

    def __init__(self, total_slabs: int) -> None:
        self.total_slabs = total_slabs
        self.weights: dict[ModelName, int] = {}
        self.loading: set[ModelName] = set()
        self.kv: dict[ModelName, int] = {}
        self.high_water_slabs = 0

    @property
    def free_slabs(self) -> int:
        return self.total_slabs - sum(self.weights.values()) - sum(self.kv.values())

    def begin_load(self, model: ModelName, slabs: int) -> None:
        """Hold the slabs of weights on their way in. Raises `LedgerError` if they are not free."""
        if model in self.weights:
            raise LedgerError(f"weights of {model} are already on the device")
        self._claim(slabs, f"the weights of {model}")
        self.weights[model] = slabs
        self.loading.add(model)
        self._note()

    def loaded(self, model: ModelName) -> None:
        """The weights arrived."""
        self.loading.discard(model)

    def evict(self, model: ModelName) -> None:
        """The weights are gone (or never arrive)."""
        del self.weights[model]
        self.loading.discard(model)

    def set_kv(self, model: ModelName, slabs: int) -> None:
        """Let a model map `slabs` slabs of KV in all. Raises `LedgerError` if they are not free."""
        self._claim(slabs - self.kv.get(model, 0), f"the KV of {model}")
        if slabs:
            self.kv[model] = slabs
        else:
            self.kv.pop(model, None)
        self._note()

    def check_integrity(self) -> None:
        """Raises `LedgerError` if the books do not balance."""
        in_flight = sum(self.weights[model] for model in self.loading)
        held = sum(self.weights.values()) - in_flight + sum(self.kv.values())
        balanced = self.free_slabs + held + in_flight == self.total_slabs
        if not balanced or self.free_slabs < 0 or min(self.kv.values(), default=1) < 1:
            raise LedgerError(
                f"device: {self.free_slabs} free + {held} held + {in_flight} in flight"
                f" != {self.total_slabs} slabs"
            )

    def _claim(self, slabs: int, what: str) -> None:
        if slabs > self.free_slabs:
            raise LedgerError(f"{what} need {slabs} slabs, {self.free_slabs} are free")

    def _note(self) -> None:
        self.high_water_slabs = max(self.high_water_slabs, self.total_slabs - self.free_slabs)


class HostLedger:
    """Places in the host tier: whole slabs for master weights, blocks of any shape for KV.

    A KV shape is known by its block size. It takes runs of slabs just long enough for one block
    (one slab, mostly), cuts them into blocks, fills the fullest first, and gives a run back when
    its last block is returned. Slabs held back for weights that are not here yet are never used
    for KV. Offsets are bytes from the start of the tier.
    """

    def __init__(self, total_bytes: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.total_slabs = total_bytes // slab_bytes
        self._taken = bytearray(self.total_slabs)
        self._free_slabs = self.total_slabs
        self._weights: dict[ModelName, tuple[int, ...]] = {}
        self._held_back: dict[ModelName, int] = {}
        self._runs: dict[int, dict[int, list[int]]] = {}
        """block bytes -> first slab of a run -> free block offsets in it."""
        self._run_of: dict[int, tuple[int, int]] = {}
        """block offset in use -> (block bytes, first slab of its run)."""

    @property
    def free_slabs(self) -> int:
        return self._free_slabs

    @property
    def weight_slabs(self) -> int:
        return sum(len(offsets) for offsets in self._weights.values())

    @property
    def kv_slabs(self) -> int:
        return sum(len(runs) * self._run_slabs(size) for size, runs in self._runs.items())

    def hold_back(self, model: ModelName, slabs: int) -> None:
        """Keep about this many slabs free until the weights of the model are taken."""
        self._held_back[model] = slabs

    def take_weights(self, model: ModelName, slabs: int) -> tuple[int, ...] | None:
        """Slabs for the master image of a model; the same ones whenever it is asked again."""
        if model in self._weights:
            return self._weights[model]
        others = sum(self._held_back.values()) - self._held_back.get(model, 0)
        if slabs > self._free_slabs - others:
            return None
        self._held_back.pop(model, None)
        offsets = tuple(self._take_run(1) * self.slab_bytes for _ in range(slabs))
        self._weights[model] = offsets
        return offsets

    def take_blocks(self, block_bytes: int, count: int) -> tuple[int, ...] | None:
        """Places for `count` blocks, or None if they do not all fit (nothing is taken then)."""
        runs = self._runs.setdefault(block_bytes, {})
        taken: list[int] = []
        partly_free = sorted((run for run in runs if runs[run]), key=lambda run: len(runs[run]))
        while len(taken) < count:
            if partly_free:
                run = partly_free.pop(0)
            else:
                needed = self._run_slabs(block_bytes)
                within = self._free_slabs - sum(self._held_back.values()) >= needed
                fresh = self._take_run(needed) if within else -1
                if fresh < 0:
                    self._settle(block_bytes, taken)
                    return None
                run, runs[fresh] = fresh, self._cut(fresh, block_bytes)
            free = runs[run]
            while free and len(taken) < count:
                taken.append(offset := free.pop())
                self._run_of[offset] = (block_bytes, run)
        return tuple(taken)

    def give_blocks(self, offsets: tuple[int, ...]) -> None:
        """Return blocks. Raises `LedgerError` for one that is not in use."""
        for offset in offsets:
            if offset not in self._run_of:
                raise LedgerError(f"host block at {offset} is not in use")
            self._settle(self._run_of[offset][0], [offset])

    def check_integrity(self) -> None:
        """Raises `LedgerError` if the books do not balance."""
        held = self.weight_slabs + self.kv_slabs
        used = sum(self._taken)
        blocks = sum(
            self._run_slabs(size) * self.slab_bytes // size - len(free)
            for size, runs in self._runs.items()
            for free in runs.values()
        )
        if self._free_slabs + held != self.total_slabs or used != held:
            raise LedgerError(
                f"host: {self._free_slabs} free + {held} held != {self.total_slabs} slabs"
            )
        if blocks != len(self._run_of):
            raise LedgerError(f"host: {blocks} blocks out of runs, {len(self._run_of)} in use")

    def _run_slabs(self, block_bytes: int) -> int:
        return -(-block_bytes // self.slab_bytes)

    def _take_run(self, slabs: int) -> int:
        """First slab of a free run of this many slabs, or -1."""
        first = self._taken.find(bytes(slabs))
        if first >= 0:
            self._taken[first : first + slabs] = b"\1" * slabs
            self._free_slabs -= slabs
        return first

    def _cut(self, run: int, block_bytes: int) -> list[int]:
        start = run * self.slab_bytes
        count = self._run_slabs(block_bytes) * self.slab_bytes // block_bytes
        return [start + index * block_bytes for index in reversed(range(count))]

    def _settle(self, block_bytes: int, offsets: list[int]) -> None:
        """Put blocks back, and give back every run that is empty now."""
        runs = self._runs[block_bytes]
        slabs = self._run_slabs(block_bytes)
        whole = slabs * self.slab_bytes // block_bytes
        for offset in offsets:
            _, run = self._run_of.pop(offset)
            runs[run].append(offset)
            if len(runs[run]) == whole:
                del runs[run]
                self._taken[run : run + slabs] = bytes(slabs)
                self._free_slabs += slabs
