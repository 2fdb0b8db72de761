"""Who holds which memory, as the scheduling machine sees it: counts on devices, places on the host.

Pure bookkeeping. A worker enforces the same limits physically (`appliance.memory.arena`); this is
the plan. On every tier ``free + held + in flight == total`` at all times, which
`check_integrity` asserts. That the host tier is full is an answer (``None``); on a device the
machine makes room first, so claiming slabs that are not free is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from appliance.errors import LedgerError
from appliance.vocabulary import ModelName, RequestId


class DeviceLedger:
    """Slabs of one instance, by model: weights (in flight while they load) and KV.

    KV counts are caps: what a model may have mapped until the worker reports what it did map. Some
    of those slabs are *cold*: they hold prefix cache that no request uses, and cost only that to
    give up. All operations are O(1) but `free_slabs`, which is O(models on the device).
    """

    def __init__(self, total_slabs: int) -> None:
        self.total_slabs = total_slabs
        self.weights: dict[ModelName, int] = {}
        self.loading: set[ModelName] = set()
        self.kv: dict[ModelName, int] = {}
        self.cold: dict[ModelName, int] = {}
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

    def set_kv(self, model: ModelName, slabs: int, cold_slabs: int = 0) -> None:
        """Let a model map `slabs` slabs of KV in all, `cold_slabs` of which it can do without.

        Raises `LedgerError` if they are not free.
        """
        self._claim(slabs - self.kv.get(model, 0), f"the KV of {model}")
        for table, count in ((self.kv, slabs), (self.cold, cold_slabs)):
            if count:
                table[model] = count
            else:
                table.pop(model, None)
        self._note()

    def check_integrity(self) -> None:
        """Raises `LedgerError` if the books do not balance."""
        in_flight = sum(self.weights[model] for model in self.loading)
        held = sum(self.weights.values()) - in_flight + sum(self.kv.values())
        balanced = self.free_slabs + held + in_flight == self.total_slabs
        balanced &= all(0 < slabs <= self.kv.get(m, 0) for m, slabs in self.cold.items())
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
    for KV, and `kv_floor_slabs` are never used for weights. Offsets are bytes from the start of
    the tier. Taking and giving cost O(slabs or blocks taken, + blocks in a run), amortised, however
    many are in use.
    """

    def __init__(self, total_bytes: int, slab_bytes: int, kv_floor_slabs: int = 0) -> None:
        self.slab_bytes = slab_bytes
        self.total_slabs = total_bytes // slab_bytes
        self.kv_floor_slabs = kv_floor_slabs
        self._taken = bytearray(self.total_slabs)
        self._free_slabs = self.total_slabs
        self._weights: dict[ModelName, tuple[range, ...]] = {}
        """Slabs in a row of each master image."""
        self._held_back: dict[ModelName, int] = {}
        self._runs: dict[int, int] = {}
        """block bytes -> number of runs."""
        self._kv_taken: dict[int, bytearray] = {}
        """block bytes -> for each slab of the tier, whether it is of such a run."""
        self._free: dict[int, dict[int, list[int]]] = {}
        """block bytes -> first slab of a run with free blocks -> their offsets."""
        self._open: dict[int, dict[int, dict[int, None]]] = {}
        """block bytes -> number of free blocks, above 0 -> runs with as many."""
        self._first_free = 0
        """No slab before this one is free."""
        self._free_ends: dict[int, int] = {}
        """How many slabs in a row -> no such run of free slabs ends behind this."""
        self._run_of: dict[int, tuple[int, int]] = {}
        """block offset in use -> (block bytes, first slab of its run)."""
        self._peak_kv_slabs = 0

    @property
    def free_slabs(self) -> int:
        return self._free_slabs

    @property
    def weights(self) -> dict[ModelName, int]:
        """Slabs of each master image."""
        return {model: sum(map(len, rows)) for model, rows in self._weights.items()}

    def rows(self) -> dict[str, Sequence[range]]:
        """Slabs in a row of each owner, in the order of addresses: ``weights:<model>``,
        ``kv:<bytes of a block>``. O(rows), and a search of the tier for each size of blocks."""
        found: dict[str, Sequence[range]] = {
            f"weights:{model}": rows for model, rows in self._weights.items()
        }
        for block_bytes, taken in self._kv_taken.items():
            found[f"kv:{block_bytes}"] = list(_rows(taken))
        return found

    @property
    def weight_slabs(self) -> int:
        return sum(self.weights.values())

    @property
    def kv_slabs(self) -> int:
        return sum([runs * self._run_slabs(size) for size, runs in self._runs.items()])

    @property
    def peak_kv_slabs(self) -> int:
        """The most slabs that KV ever had."""
        return self._peak_kv_slabs

    @property
    def kv_room_slabs(self) -> int:
        """Slabs that KV has, or could have while weights keep theirs."""
        return self.kv_slabs + self.kv_free_slabs

    @property
    def kv_free_slabs(self) -> int:
        """Free slabs that KV could take."""
        return max(0, self._free_for_kv)

    def kv_use(self) -> dict[int, tuple[int, int]]:
        """For each block size: bytes of the blocks in use, and of the slabs they lie in."""
        return {
            size: (
                self._used_blocks(size) * size,
                runs * self._run_slabs(size) * self.slab_bytes,
            )
            for size, runs in self._runs.items()
        }

    def hold_back(self, model: ModelName, slabs: int) -> None:
        """Keep this many slabs free until the weights of the model are taken, or given up (0)."""
        if slabs:
            self._held_back[model] = slabs
        else:
            self._held_back.pop(model, None)

    @property
    def held_back(self) -> dict[ModelName, int]:
        """Slabs kept free for the weights of each model."""
        return dict(self._held_back)

    def room_for_weights(self, model: ModelName) -> int:
        """Slabs that the model's weights could take now."""
        others = sum(self._held_back.values()) - self._held_back.get(model, 0)
        kv_short = max(0, self.kv_floor_slabs - self.kv_slabs)
        return self._free_slabs - others - kv_short

    @property
    def kv_floor_offset(self) -> int:
        """Where the last `kv_floor_slabs` slabs begin: KV of one request fits if they are free."""
        return (self.total_slabs - self.kv_floor_slabs) * self.slab_bytes

    @property
    def short_slabs(self) -> int:
        """Slabs that weights have, or are held back for them, and KV should have: none unless
        `kv_floor_slabs` was raised."""
        return max(0, self.kv_floor_slabs - self._free_for_kv - self.kv_slabs)

    def take_weights(self, model: ModelName, slabs: int) -> tuple[int, ...] | None:
        """Slabs for the master image of a model, or None if there is no room.

        Raises `LedgerError` if it has some already.
        """
        if model in self._weights:
            raise LedgerError(f"the weights of {model} are in the host tier already")
        if slabs > self.room_for_weights(model):
            return None
        self._held_back.pop(model, None)
        rows: list[range] = []
        while slabs:
            first = self._first_free_slab()
            behind = self._taken.find(1, first, first + slabs)
            rows.append(range(first, first + slabs if behind < 0 else behind))
            self._claim_run(first, len(rows[-1]))
            slabs -= len(rows[-1])
        self._weights[model] = tuple(rows)
        return tuple(slab * self.slab_bytes for row in rows for slab in row)

    def give_weights(self, model: ModelName) -> None:
        """The master image of a model is not needed any more."""
        for row in self._weights.pop(model):
            self._free_run(row.start, len(row))

    def shrink_weights(self, model: ModelName, slabs: int) -> None:
        """The master image of a model takes its first `slabs` slabs only; the rest is free."""
        kept: list[range] = []
        for row in self._weights[model]:
            mine = row[:slabs]
            slabs -= len(mine)
            if mine:
                kept.append(mine)
            if left := row[len(mine) :]:
                self._free_run(left.start, len(left))
        self._weights[model] = tuple(kept)

    def room_for_blocks(self, block_bytes: int) -> int:
        """Blocks of this size that KV could take now, if its slabs lie in a row where a block is
        longer than one. O(sizes of runs)."""
        partly_free = self._open.get(block_bytes, {})
        inside = sum([free * len(runs) for free, runs in partly_free.items()])
        runs = self.kv_free_slabs // self._run_slabs(block_bytes)
        return inside + runs * self._run_blocks(block_bytes)

    def take_blocks(self, block_bytes: int, count: int) -> tuple[int, ...] | None:
        """Places for `count` blocks, or None if they do not all fit (nothing is taken then)."""
        self._runs.setdefault(block_bytes, 0)
        self._kv_taken.setdefault(block_bytes, bytearray(self.total_slabs))
        free = self._free.setdefault(block_bytes, {})
        partly_free = self._open.setdefault(block_bytes, {})
        taken: list[int] = []
        while partly_free and len(taken) < count:
            before = min(partly_free)
            run = next(iter(partly_free[before]))
            while free[run] and len(taken) < count:
                taken.append(offset := free[run].pop())
                self._run_of[offset] = (block_bytes, run)
            self._file(block_bytes, run, before)
        blocks = self._run_blocks(block_bytes)
        while len(taken) < count:
            fresh = self._claim_last_runs(block_bytes, count - len(taken))
            if not fresh:
                self._settle(block_bytes, taken)
                return None
            for run in fresh:
                start, place = run * self.slab_bytes, (block_bytes, run)
                for offset in range(start, start + blocks * block_bytes, block_bytes):
                    taken.append(offset)
                    self._run_of[offset] = place
            if len(taken) > count:
                free[run] = [taken.pop() for _ in range(len(taken) - count)]
                for offset in free[run]:
                    del self._run_of[offset]
                self._file(block_bytes, run, 0)
        self._peak_kv_slabs = max(self._peak_kv_slabs, self.kv_slabs)
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
        blocks = sum(map(self._used_blocks, self._runs))
        if self._free_slabs + held != self.total_slabs or used != held:
            raise LedgerError(
                f"host: {self._free_slabs} free + {held} held != {self.total_slabs} slabs"
            )
        if blocks != len(self._run_of):
            raise LedgerError(f"host: {blocks} blocks out of runs, {len(self._run_of)} in use")

    @property
    def _free_for_kv(self) -> int:
        """Free slabs that are not held back for weights; below 0 if too many are."""
        return self._free_slabs - sum(self._held_back.values())

    def _run_slabs(self, block_bytes: int) -> int:
        return -(-block_bytes // self.slab_bytes)

    def _run_blocks(self, block_bytes: int) -> int:
        return self._run_slabs(block_bytes) * self.slab_bytes // block_bytes

    def _used_blocks(self, block_bytes: int) -> int:
        blocks = self._runs[block_bytes] * self._run_blocks(block_bytes)
        return blocks - sum(map(len, self._free[block_bytes].values()))

    def _first_free_slab(self) -> int:
        """Weights fill the tier from its start, KV from its end: neither tears holes into the room
        of the other."""
        self._first_free = self._taken.find(0, self._first_free)
        return self._first_free

    def _claim_last_runs(self, block_bytes: int, blocks: int) -> Sequence[int]:
        """Take runs for so many blocks as far back as there are any, all in a row; fewer if the row
        or what may be taken ends, none if there is none."""
        needed = self._run_slabs(block_bytes)
        room = self._free_for_kv
        if room < needed:
            return ()
        end = self._free_ends.get(needed, self.total_slabs)
        last = self._taken.rfind(bytes(needed), 0, end)
        if last < 0:
            self._free_ends[needed] = 0
            return ()
        first = self._taken.rfind(1, 0, last) + 1
        wanted = -(-blocks // self._run_blocks(block_bytes))
        count = min(wanted, room // needed, 1 + (last - first) // needed)
        first = last - (count - 1) * needed
        self._claim_run(first, count * needed)
        self._kv_taken[block_bytes][first : last + needed] = b"\1" * (count * needed)
        self._runs[block_bytes] += count
        self._free_ends[needed] = first + needed
        return range(last, first - 1, -needed)

    def _free_run(self, first: int, slabs: int) -> None:
        """These slabs are not in use any more."""
        self._taken[first : first + slabs] = bytes(slabs)
        self._free_slabs += slabs
        self._first_free = min(self._first_free, first)
        for needed, end in self._free_ends.items():
            longest = min(first + slabs + needed - 1, self.total_slabs)
            self._free_ends[needed] = max(end, longest)

    def _file(self, block_bytes: int, run: int, before: int) -> None:
        """Note how many free blocks the run has, if it still exists; it had `before`."""
        table = self._open[block_bytes]
        if before:
            del table[before][run]
            if not table[before]:
                del table[before]
        free = self._free[block_bytes]
        if now := len(free[run]):
            table.setdefault(now, {})[run] = None
        else:
            del free[run]

    def _claim_run(self, first: int, slabs: int) -> None:
        """Take free slabs in a row."""
        self._taken[first : first + slabs] = b"\1" * slabs
        self._free_slabs -= slabs

    def _settle(self, block_bytes: int, offsets: list[int]) -> None:
        """Put blocks back, and give back every run that is empty now."""
        free = self._free[block_bytes]
        slabs = self._run_slabs(block_bytes)
        whole = self._run_blocks(block_bytes)
        taken = self._kv_taken[block_bytes]
        for offset in offsets:
            _, run = self._run_of.pop(offset)
            blocks = free.setdefault(run, [])
            before = len(blocks)
            blocks.append(offset)
            if before + 1 == whole:
                blocks.clear()
                self._runs[block_bytes] -= 1
                self._free_run(run, slabs)
                taken[run : run + slabs] = bytes(slabs)
            self._file(block_bytes, run, before)


class DiskLedger:
    """Bytes of the folder for KV on disk, by request. All operations are O(1)."""

    def __init__(self, total_bytes: int) -> None:
        """0 bytes if there is no such folder."""
        self.total_bytes = total_bytes
        self.held: dict[RequestId, int] = {}
        self.held_bytes = 0

    def take(self, request: RequestId, nbytes: int) -> bool:
        """Hold room for the KV of a request; False if there is not as much. Raises `LedgerError` if
        the request holds some."""
        if request in self.held:
            raise LedgerError(f"the KV of {request} is on disk already")
        if self.held_bytes + nbytes > self.total_bytes:
            return False
        self.held[request] = nbytes
        self.held_bytes += nbytes
        return True

    def give(self, request: RequestId) -> None:
        """The KV of a request is not on disk any more."""
        self.held_bytes -= self.held.pop(request)

    def check_integrity(self) -> None:
        """Raises `LedgerError` if the books do not balance."""
        if sum(self.held.values()) != self.held_bytes or self.held_bytes > self.total_bytes:
            raise LedgerError(f"disk: {self.held_bytes} of {self.total_bytes} bytes are held")


def _rows(taken: bytearray) -> Iterator[range]:
    """Where there are ones in a row."""
    end = 0
    while (first := taken.find(1, end)) >= 0:
        behind = taken.find(0, first)
        end = len(taken) if behind < 0 else behind
        yield range(first, end)
