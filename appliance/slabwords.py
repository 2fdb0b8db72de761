"""What is said about slabs: whose each one is, in the order of their addresses."""

from __future__ import annotations

from appliance.vocabulary import Word


class SlabOwner(Word, frozen=True):
    """``free``, ``weights:<model>``; on a device ``kv:<model>`` and, on a GPU, ``runtime``; in the
    host tier ``kv:<bytes of a block>``. `moving`: bytes are on their way to or from there."""

    name: str
    moving: bool = False


class SlabMap(Word, frozen=True):
    """All slabs of a tier, as runs of slabs that have the same owner."""

    slab_bytes: int
    owners: tuple[SlabOwner, ...]
    runs: tuple[tuple[int, int], ...]
    """Place of the owner among `owners`, and how many slabs."""
