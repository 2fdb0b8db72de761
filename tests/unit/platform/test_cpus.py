"""Lists of processors, who gets which, and what they pack."""

from __future__ import annotations

import errno
import os
import platform
from pathlib import Path

import pytest

from appliance.errors import ApplianceError
from appliance.platform.cpus import (
    binding_refusal,
    computes_four_bits,
    deal_cpus,
    front_end_count,
    kept_cpus,
    packs,
    read_cpus,
    show_cpus,
)
from appliance.serve import keep_to, share_cpus
from appliance.worker import frames
from appliance.worker.rank_messages import Seat, seats


def test_lists_are_read() -> None:
    """Ranges and single CPUs, as in taskset."""
    assert read_cpus("0-3,8") == [0, 1, 2, 3, 8]
    assert read_cpus(show_cpus([1, 5])) == [1, 5]
    for text in ("", "3-1", "a"):
        with pytest.raises(ValueError, match=r"names no CPU|invalid literal"):
            read_cpus(text)


def test_a_deal_is_even() -> None:
    """Neighbours stay together, shares differ by one at most, scarce processors are shared."""
    assert deal_cpus([2, 4, 6, 8], 2) == [[2, 4], [6, 8]]
    assert deal_cpus([0, 1, 2], 2) == [[0], [1, 2]]
    assert deal_cpus([5], 3) == [[5], [5], [5]]


@pytest.mark.parametrize(
    ("allowed", "ranks", "shares"),
    [
        ([0, 1], [2], ["0,1"]),
        ([0, 1, 2], [2], ["0,1"]),
        ([0, 1, 2, 3, 4], [2, 2], ["0,1", "2,3"]),
        ([0, 1], [2, 2], ["0", "1"]),
        ([0, 1, 2, 3], [2, 1], ["0,1", "2"]),
        ([0, 1], [2, 1], ["0", "1"]),
    ],
)
def test_the_daemon_takes_what_ranks_leave(
    allowed: list[int], ranks: list[int], shares: list[str]
) -> None:
    """One processor is the daemon's only if every rank has one of its own. An instance of two ranks
    has twice as many as one of one."""
    assert share_cpus(allowed, ranks) == shares


def test_a_system_that_forbids_binding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon refuses to start, as its workers could not be bound; the doctor can say why."""
    own = sorted(os.sched_getaffinity(0))
    keep_to(own)
    assert binding_refusal() == ""
    assert sorted(os.sched_getaffinity(0)) == own

    def forbid(process: int, cpus: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbid)

    assert binding_refusal() == "Operation not permitted"
    with pytest.raises(ApplianceError, match=r"\(Operation not permitted\); allow sched_set"):
        keep_to(own)


def test_front_ends_have_processors() -> None:
    """One for every eight by itself, within bounds, or as many as configured; each has a processor
    that no worker has, as far as there are any."""
    assert [front_end_count("auto", cpus) for cpus in (2, 8, 16, 192)] == [1, 1, 2, 4]
    assert front_end_count(7, 2) == 7
    assert [kept_cpus(cpus, 2, 3) for cpus in (1, 2, 3, 4, 16)] == [0, 0, 1, 2, 3]
    assert share_cpus([0, 1, 2, 3, 4], [1, 1], 3) == ["0", "1"]


@pytest.mark.parametrize(
    ("cpus", "ranks", "shares", "crowded"),
    [("4-7", 2, ["4,5", "6,7"], False), ("3", 2, ["3", "3"], True), ("0,1", 2, ["0", "1"], False)],
)
def test_ranks_divide_the_processors(
    cpus: str, ranks: int, shares: list[str], crowded: bool
) -> None:
    """Every rank has its own, unless there are too few; then they know that they are crowded."""
    assert seats(configuration(cpus, ranks), "/store") == [
        Seat(rank, ranks, share, "/store", crowded) for rank, share in enumerate(shares)
    ]


def test_one_rank_has_all() -> None:
    """An instance of one process is what it always was."""
    assert seats(configuration("0-3", 1), "/store") == [Seat(0, 1, "0-3")]


def configuration(cpus: str, ranks: int) -> frames.Configure:
    return frames.Configure(
        version=frames.PROTOCOL_VERSION,
        instance=0,
        cpus=cpus,
        slabs=1,
        slab_bytes=1,
        host_bytes=1,
        models=[],
        ranks=ranks,
    )


@pytest.mark.parametrize(
    ("flags", "packed"),
    [
        ("sse2 avx2", ["float32"]),
        ("avx512f avx512bw avx512vl avx512dq", ["float32", "bfloat16"]),
        ("avx512f avx512bw avx512vl avx512dq avx512_fp16", ["float32", "bfloat16", "float16"]),
        ("avx2 avx_vnni_int8 avx_ne_convert", ["float32", "bfloat16", "float16"]),
    ],
)
def test_packing_needs_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, packed: list[str]
) -> None:
    """For each type its own, which the system lists; elsewhere nothing is packed."""
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: x\n")

    def found(cpuinfo: Path) -> list[str]:
        return [name for name in ("float32", "bfloat16", "float16", "int8") if packs(name, cpuinfo)]

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert found(file) == packed
    assert found(tmp_path / "nothing") == ["float32"]
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert found(file) == []


@pytest.mark.parametrize(
    ("flags", "computed"),
    [
        ("sse2 avx2 avx512f", False),
        ("avx2 avx_vnni_int8 avx_ne_convert", False),
        ("avx2 avx512f avx512bw avx512vl avx512dq", True),
    ],
)
def test_weights_in_4_bits_need_instructions(tmp_path: Path, flags: str, computed: bool) -> None:
    """Those without which vLLM loads its build for AVX2."""
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")

    assert computes_four_bits(file) is computed
    assert not computes_four_bits(tmp_path / "nothing")
