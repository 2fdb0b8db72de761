"""What pools hold: by owner as it is counted, or slab by slab as it lies; and cells of that."""

from __future__ import annotations

from typing import NamedTuple

from tui.drawing.amounts import divide, size
from tui.messages import Document


class PoolPart(NamedTuple):
    """`kind`: ``weights``, ``loading`` (weights on their way), ``kv``, ``moving`` (KV on its way),
    ``runtime`` or ``free``. `of` is a model; of KV in the host cache how large its blocks are."""

    kind: str
    of: str
    amount: int
    """Bytes, or slabs."""


class Pool(NamedTuple):
    """`parts` are bytes by owner, the free ones last. `cells`, not more than there was room for,
    are of whom they are, in order; `scale` says how much one is."""

    name: str
    parts: list[PoolPart]
    cells: list[PoolPart]
    scale: str


ON_THE_WAY = {"weights": "loading", "kv": "moving"}


def counted(name: str, owners: Document, loading: set[str], room: int) -> Pool:
    """A pool of which it is known how many bytes each owner has; `loading` are models whose weights
    are on their way. Cells are in the order of owners."""
    parts = []
    for owner, nbytes in owners.items():
        kind, _, model = owner.partition(":")
        if kind == "weights" and model in loading:
            kind = "loading"
        if nbytes and kind != "free":
            parts.append(PoolPart(kind, model, nbytes))
    parts.sort(key=lambda part: (part.of, part.kind))
    parts.append(PoolPart("free", "", owners.get("free", 0)))
    cells: list[PoolPart] = []
    for part, share in zip(parts, divide(room, (part.amount for part in parts)), strict=True):
        cells += [part] * share
    whole = sum(part.amount for part in parts)
    scale = f"in the order of owners, a cell is {size(whole / room)}" if whole else ""
    return Pool(name, parts, cells, scale)


def mapped(name: str, document: Document, room: int, *, host: bool = False) -> Pool:
    """A pool of which it is known whose each slab is: the answer of ``/api/instances/N/slabs``, or
    of ``/api/host/slabs``. Cells are in the order of addresses; one that shows several slabs
    is of whom most of them are."""
    slab_bytes = document["slab_bytes"]
    owners = [_owner(row["name"], moving=row["moving"], host=host) for row in document["owners"]]
    slabs = dict.fromkeys(owners, 0)
    for place, count in document["runs"]:
        slabs[owners[place]] += count
    free = slabs.pop(PoolPart("free", "", 0), 0)
    parts = [part._replace(amount=count * slab_bytes) for part, count in slabs.items() if count]
    parts.sort(key=lambda part: (part.of, part.kind))
    parts.append(PoolPart("free", "", free * slab_bytes))
    runs = [(owners[place], count) for place, count in document["runs"]]
    whole = sum(count for _, count in runs)
    if whole > room:
        cells = _thinned(runs, whole, room)
        scale = f"a cell is {whole / room:.3g} slabs of {size(slab_bytes)}"
    else:
        each = room // max(1, whole)
        cells = [part for part, count in runs for _ in range(count * each)]
        scale = f"a slab of {size(slab_bytes)} is {each} cell{'s' if each > 1 else ''}"
    return Pool(name, parts, cells, f"by address, {scale}")


def _owner(name: str, *, moving: bool, host: bool) -> PoolPart:
    kind, _, of = name.partition(":")
    if host and kind == "kv":
        of = f"KV in blocks of {size(int(of))}"
    return PoolPart(ON_THE_WAY.get(kind, kind) if moving else kind, of, 0)


def _thinned(runs: list[tuple[PoolPart, int]], whole: int, room: int) -> list[PoolPart]:
    """A cell for every `whole / room` slabs: of whom most of them are, the first of equals."""
    cells: list[PoolPart] = []
    rest = iter(runs)
    part, left = next(rest)
    for cell in range(room):
        missing = (cell + 1) * whole // room - cell * whole // room
        votes: dict[PoolPart, int] = {}
        while missing:
            if not left:
                part, left = next(rest)
            taken = min(left, missing)
            votes[part] = votes.get(part, 0) + taken
            left, missing = left - taken, missing - taken
        cells.append(max(votes, key=votes.__getitem__))
    return cells
