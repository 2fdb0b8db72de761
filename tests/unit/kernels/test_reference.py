"""The kernels' own source, run on the CPU as C++, does what the references in PyTorch do.

It shows what a kernel computes, in whatever order its threads run; never how fast, and nothing that
is particular to a GPU.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.kernels import loader, reference
from tests.stand_in.kernels import kernels

CASES = settings(max_examples=300, deadline=None, derandomize=True)


def fingerprint(data: torch.Tensor, grid: int = 3, threads: int = 32, backwards: int = 0) -> int:
    total = ctypes.c_uint64()
    kernels().run_fingerprint(
        grid,
        threads,
        backwards,
        ctypes.c_void_p(data.data_ptr()),
        ctypes.c_longlong(data.numel()),
        ctypes.byref(total),
    )
    return total.value


@st.composite
def launches(draw: st.DrawFn) -> tuple[int, int, int]:
    return draw(st.integers(1, 5)), draw(st.integers(1, 70)), draw(st.integers(0, 1))


@CASES
@given(nbytes=st.integers(0, 5000), seed=st.integers(0, 1 << 30), launch=launches())
def test_fingerprint(nbytes: int, seed: int, launch: tuple[int, int, int]) -> None:
    """Kernel and reference agree for every length and every launch."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)

    assert fingerprint(data, *launch) == reference.fingerprint(data)


def in_plain_numbers(data: bytes) -> int:
    """The definition, in Python's integers."""
    total = 0
    for place, start in enumerate(range(0, len(data), 8), start=1):
        x = int.from_bytes(data[start : start + 8], "little")
        x ^= place * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        total += x ^ x >> 31
    return total % 2**64


@pytest.mark.parametrize("nbytes", [0, 1, 8, 11, 256])
def test_fingerprint_by_definition(nbytes: int) -> None:
    """The reference is the definition, so fingerprints that were kept stay true."""
    data = torch.arange(256, dtype=torch.uint8)[:nbytes]

    assert reference.fingerprint(data) == in_plain_numbers(bytes(data.tolist()))


@CASES
@given(nbytes=st.integers(1, 400), at=st.integers(0, 399), seed=st.integers(0, 1 << 30))
def test_fingerprint_tells_bytes_and_places(nbytes: int, at: int, seed: int) -> None:
    """One bit more, or two words exchanged, is another fingerprint."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    before = reference.fingerprint(data)
    changed = data.clone()
    changed[at % nbytes] ^= 1 << seed % 8

    assert reference.fingerprint(changed) != before
    if nbytes >= 16 and not torch.equal(data[:8], data[8:16]):
        exchanged = data.clone()
        exchanged[:8], exchanged[8:16] = data[8:16], data[:8]
        assert reference.fingerprint(exchanged) != before


def test_fingerprint_over_many_chunks() -> None:
    """A range larger than what the reference mixes at one go, with a tail."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, ((3 << 20) + 5,), dtype=torch.uint8, generator=generator)

    assert fingerprint(data, 4, 64) == reference.fingerprint(data)
    assert reference.fingerprint(data.view(torch.uint8)[: 3 << 20].view(torch.bfloat16)) == (
        reference.fingerprint(data[: 3 << 20])
    )


@CASES
@given(data=st.data())
def test_blocks_are_gathered_and_scattered(data: st.DataObject) -> None:
    """Any number of planes, blocks, strides and bytes: as the reference, and nothing beside it."""
    planes = data.draw(st.integers(1, 5), "planes")
    total = data.draw(st.integers(1, 7), "blocks in the engine")
    block_bytes = data.draw(st.integers(1, 100) | st.sampled_from([16, 64, 256]), "block bytes")
    gap = st.integers(0, 20) | st.sampled_from([0, 16])
    layer_outermost = data.draw(st.booleans(), "layer outermost")
    if layer_outermost:
        block_stride = block_bytes + data.draw(gap, "gap")
        plane_stride = total * block_stride + data.draw(gap, "gap")
    else:
        plane_stride = block_bytes + data.draw(gap, "gap")
        block_stride = planes * plane_stride + data.draw(gap, "gap")
    packed_stride = planes * block_bytes + data.draw(gap, "gap")
    blocks = torch.tensor(data.draw(st.permutations(range(total)), "order"))
    blocks = blocks[: data.draw(st.integers(0, total), "moved")]
    room = len(blocks) + 2
    places = torch.tensor(data.draw(st.permutations(range(room)), "places"))[: len(blocks)]
    shift = data.draw(st.integers(0, 16), "misalignment")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30), "seed"))

    def noise(nbytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (shift + nbytes,), dtype=torch.uint8, generator=generator)

    base = noise(planes * plane_stride + total * block_stride)
    packed = noise(room * packed_stride)
    sizes = (planes, block_bytes, plane_stride, block_stride, packed_stride)
    launch = data.draw(launches(), "launch")
    for name, function, target, source in (
        ("run_gather", reference.gather_blocks, packed, base),
        ("run_scatter", reference.scatter_blocks, base, packed),
    ):
        expected, seen = target.clone(), target.clone()
        function(expected[shift:], source[shift:], blocks, places, *sizes)
        getattr(kernels(), name)(
            *launch,
            ctypes.c_void_p(seen.data_ptr() + shift),
            ctypes.c_void_p(source.data_ptr() + shift),
            ctypes.c_void_p(blocks.data_ptr()),
            ctypes.c_void_p(places.data_ptr()),
            ctypes.c_longlong(len(blocks)),
            *map(ctypes.c_longlong, sizes),
        )

        assert torch.equal(seen, expected)


def test_a_round_trip_over_vectors() -> None:
    """Blocks of a real size, aligned, go out and come back to other places unchanged."""
    planes, total, block_bytes = 4, 6, 4096
    generator = torch.Generator().manual_seed(3)
    base = torch.randint(
        0, 256, (planes * total * block_bytes,), dtype=torch.uint8, generator=generator
    )
    packed = torch.zeros(total * planes * block_bytes, dtype=torch.uint8)
    back = torch.zeros_like(base)
    order, places = torch.tensor([3, 1, 5, 0, 2, 4]), torch.arange(total)
    sizes = (planes, block_bytes, total * block_bytes, block_bytes, planes * block_bytes)
    for name, to, start, blocks in (
        ("run_gather", packed, base, order),
        ("run_scatter", back, packed, order.flip(0)),
    ):
        getattr(kernels(), name)(
            7,
            128,
            0,
            ctypes.c_void_p(to.data_ptr()),
            ctypes.c_void_p(start.data_ptr()),
            ctypes.c_void_p(blocks.contiguous().data_ptr()),
            ctypes.c_void_p(places.data_ptr()),
            ctypes.c_longlong(total),
            *map(ctypes.c_longlong, sizes),
        )

    engine = (planes, total, block_bytes)
    assert torch.equal(back.view(engine)[:, order.flip(0)], base.view(engine)[:, order])


def test_the_loader_asks_for_as_many_places_as_blocks() -> None:
    """What is wrong in a call is said before a kernel runs."""
    bare = object.__new__(loader.Kernels)
    sizes = dict.fromkeys(
        ("planes", "block_bytes", "plane_stride", "block_stride", "packed_stride"), 16
    )
    bare._gather = bare._scatter = None
    with pytest.raises(ValueError, match="2 blocks in 1 places"):
        bare.gather_blocks(0, 0, [1, 2], [0], **sizes)
    with pytest.raises(ValueError, match="a multiple of 8, not at 0x3"):
        bare.fingerprint(3, 8)
