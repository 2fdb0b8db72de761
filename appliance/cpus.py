"""Processors: lists of them as text, and how they are dealt out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


def read_cpus(text: str) -> list[int]:
    """The processors of a list such as ``0-3,8``. Raises `ValueError` if it names none."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    if not cpus:
        raise ValueError(f"{text!r} names no CPU")
    return sorted(cpus)


def show_cpus(cpus: Iterable[int]) -> str:
    """The list as text, in vLLM's notation."""
    return ",".join(map(str, cpus))


def deal_cpus(cpus: Sequence[int], shares: int) -> list[list[int]]:
    """Deal processors out evenly. With fewer processors than shares, neighbours have the same."""
    bounds = [number * len(cpus) // shares for number in range(shares + 1)]
    return [list(cpus[start:end]) or [cpus[start]] for start, end in pairwise(bounds)]
