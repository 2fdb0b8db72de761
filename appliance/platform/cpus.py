"""Processors: lists of them as text, how they are dealt out, and what weights they compute with."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

CPUINFO: Final = Path("/proc/cpuinfo")
CPUS_PER_FRONT_END: Final = 8
MOST_FRONT_ENDS: Final = 4
ALLOW_BINDING: Final = "allow sched_setaffinity(2), in a container by its seccomp profile"

AVX512: Final = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
"""Where these are missing (in Linux' words), vLLM loads its build for AVX2."""

_PACKED_WITH: Final[dict[str, tuple[frozenset[str], ...]]] = {
    "float32": (frozenset(),),
    "bfloat16": (
        AVX512,
        frozenset({"avx_vnni_int8", "avx_ne_convert"}),
    ),
    "float16": (frozenset({"avx512_fp16"}), frozenset({"avx_vnni_int8", "avx_ne_convert"})),
}
"""With which instructions (any of the sets, in Linux' words) oneDNN computes in a type."""


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
    return deal_cpus_by([1] * shares, cpus)


def deal_cpus_by(parts: Sequence[int], cpus: Sequence[int]) -> list[list[int]]:
    """Deal processors out so that a share of two parts has twice as many as one of one part."""
    ends = [*accumulate(parts, initial=0)]
    bounds = [end * len(cpus) // ends[-1] for end in ends]
    return [list(cpus[start:end]) or [cpus[start]] for start, end in pairwise(bounds)]


def deal_near(
    parts: Sequence[int], cpus: Sequence[int], near: Sequence[Collection[int]]
) -> list[list[int]]:
    """Deal processors out to members of so many `parts`: to each of those that it is `near` to, if
    these are as many as the parts near them, else of all. Members near the same processors share
    them, by their parts."""
    groups: dict[frozenset[int], list[int]] = {}
    for member, wanted in enumerate(near):
        groups.setdefault(frozenset(cpus).intersection(wanted), []).append(member)
    # Too few: several members would compute on one processor while others have many.
    crowded = [
        wanted
        for wanted, members in groups.items()
        if len(wanted) < sum([parts[member] for member in members])
    ]
    anywhere = sorted([member for wanted in crowded for member in groups.pop(wanted)])
    dealt: dict[int, list[int]] = {}
    for of, members in [*groups.items(), *([(frozenset(cpus), anywhere)] if anywhere else ())]:
        shares = deal_cpus_by([parts[one] for one in members], [cpu for cpu in cpus if cpu in of])
        dealt |= zip(members, shares, strict=True)
    return [dealt[member] for member in range(len(near))]


def front_end_count(configured: int | str, cpus: int) -> int:
    """How many front ends `api.processes` means on a machine with so many processors."""
    if isinstance(configured, int):
        return configured
    return max(1, min(MOST_FRONT_ENDS, cpus // CPUS_PER_FRONT_END))


def kept_cpus(cpus: int, workers: int, processes: int) -> int:
    """How many processors the daemon has together with its front ends: one for each of these, if
    there are more than workers; with too few all are shared."""
    return max(0, min(processes, cpus - workers))


def usable_by_workers(allowed: Sequence[int], workers: int, processes: int) -> Sequence[int]:
    """The processors that are not kept for the daemon and its front ends (`processes`)."""
    return allowed[: len(allowed) - kept_cpus(len(allowed), workers, processes)]


def binding_refusal() -> str:
    """Why this process cannot choose its processors; "" if it can. Changes nothing."""
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def packs(dtype: str, cpuinfo: Path = CPUINFO) -> bool:
    """Whether engines on this machine's CPU pack weights of a type for their products: True only
    if it is certain, by what the system says of its instructions."""
    if platform.machine() != "x86_64":
        return False
    flags = _flags(cpuinfo)
    return any(needed <= flags for needed in _PACKED_WITH.get(dtype, ()))


def computes_linear_attention(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this machine's CPU has the instructions that vLLM's linear attention needs."""
    return "avx512_bf16" in _flags(cpuinfo)


def computes_four_bits(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this machine's CPU has the instructions of vLLM's kernel for weights in 4 bits
    (cpu_gemm_wna16), which its build for AVX2 does not have."""
    return _flags(cpuinfo) >= AVX512


def _flags(cpuinfo: Path) -> frozenset[str]:
    """Instructions that the first processor has."""
    try:
        with cpuinfo.open(encoding="ascii", errors="replace") as lines:
            found = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(found.partition(":")[2].split())
