"""The format `exp7` loses nothing, becomes small where it should, and tells damage; the kernel's
source, run on the CPU as C++, decodes what the reference does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.kernels import exp7, loader
from appliance.kernels.exp7 import BLOCK_BYTES, VALUES, Bytes, Damaged, Decoder, Encoder
from tests.stand_in.kernels import decode_exp7

CASES = settings(max_examples=60, deadline=None, derandomize=True)
EVERY: np.ndarray[Any, np.dtype[np.uint16]] = np.arange(VALUES, dtype=np.uint16)
MOST_ESCAPES = exp7.MOST_BYTES - exp7.FIXED_BYTES


def bf16(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """As torch makes them: the nearest."""
    words = numbers.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def weights(seed: int, count: int = VALUES) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return bf16(np.random.default_rng(seed).standard_normal(count) * 0.02)


def encoded(plain: Bytes) -> tuple[Bytes, exp7.Table]:
    """The blocks of some bytes one behind the other, and their table."""
    encoder, parts, offset = Encoder(), [], 0
    blocks = -(-len(plain) // BLOCK_BYTES)
    table = np.zeros(blocks, exp7.ENTRY)
    for block in range(blocks):
        found = encoder.encode(plain[block * BLOCK_BYTES :][:BLOCK_BYTES])
        found.enter(table, block, offset)
        parts.append(found.data)
        offset += len(found.data)
    return np.concatenate(parts), table


def decoded(data: Bytes, table: exp7.Table, nbytes: int) -> Bytes:
    decoder, plain = Decoder(), np.zeros(nbytes, np.uint8)
    for block in range(len(table)):
        entry = table[block : block + 1]
        start, size = int(entry["offset"][0]), int(entry["nbytes"][0])
        target = plain[block * BLOCK_BYTES :][:BLOCK_BYTES]
        decoder.decode(entry, data[start : start + size], target)
    return plain


def same(plain: Bytes, launch: tuple[int, int, int] = (3, 70, 0)) -> exp7.Table:
    """Both decoders bring every bit back; the table, for more questions."""
    data, table = encoded(plain)
    assert np.array_equal(decoded(data, table, len(plain)), plain)
    assert np.array_equal(decode_exp7(data, table, len(plain), launch), plain)
    return table


def test_every_number_as_an_escape_and_with_a_code() -> None:
    """All 65,536, with every payload of a NaN, infinities, both zeros and denormals: among numbers
    of other exponents, and with the seven exponents that a block has."""
    dice = np.random.default_rng(1)
    mixed = []
    for part in np.split(EVERY, 8):
        block = weights(7)
        block[dice.permutation(VALUES)[: len(part)]] = part
        mixed.append(block)
    windows = []
    for first in range(0, 256, 7):
        exponents = np.arange(first, min(first + 7, 256), dtype=np.uint16)
        own = EVERY[np.isin(EVERY >> 7 & 0xFF, exponents)]
        windows.append(np.resize(dice.permutation(own), VALUES))
    table = same(np.concatenate([*mixed, *windows]).view(np.uint8))

    assert (table["escapes"] != exp7.RAW).all()
    assert (table["escapes"][:8] > 0).all()
    assert (table["escapes"][8:] == 0).all()


def test_the_most_escapes() -> None:
    """A block with as many as are worth it, all in a row, is encoded; with one more, it is not."""
    for escapes in (MOST_ESCAPES, MOST_ESCAPES + 1):
        block = np.full(VALUES, 120 << 7, np.uint16)
        # As many of each of the six next exponents as of the eight that have to be escapes.
        others = np.arange(escapes, dtype=np.uint16) % 8 + 20
        block[100 : 100 + escapes] = others << 7
        rest = np.arange(6 * (escapes // 8 + 2), dtype=np.uint16) % 6 + 40
        block[-len(rest) :] = rest << 7
        table = same(block.view(np.uint8))

        assert (table["escapes"][0] == exp7.RAW) == (escapes > MOST_ESCAPES)


def test_what_is_no_bf16_is_kept_as_it_is() -> None:
    """Noise, float32, words of four bits: neither larger nor another."""
    dice = np.random.default_rng(2)
    noise = dice.integers(0, 256, 2 * BLOCK_BYTES, np.uint8)
    single = dice.standard_normal(BLOCK_BYTES // 4).astype(np.float32).view(np.uint8)
    table = same(np.concatenate([noise, single]))

    assert (table["escapes"] == exp7.RAW).all()
    assert table["nbytes"].sum() == 3 * BLOCK_BYTES


@st.composite
def launches(draw: st.DrawFn) -> tuple[int, int, int]:
    return draw(st.integers(1, 5)), draw(st.integers(1, 70)), draw(st.integers(0, 1))


@st.composite
def adversarial(draw: st.DrawFn) -> Bytes:
    """Blocks and part of one: weights, with a share of them replaced by anything, in rows or
    strewn, and runs of zeros as padding leaves them."""
    dice = np.random.default_rng(draw(st.integers(0, 1 << 30), "seed"))
    count = draw(st.integers(1, 2 * VALUES + 300), "numbers")
    numbers = bf16(dice.standard_normal(count) * 10.0 ** draw(st.integers(-38, 38), "scale"))
    share = draw(st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.4, 1.0]), "share")
    if draw(st.booleans(), "in a row"):
        chosen = slice(0, int(count * share))
    else:
        chosen = dice.random(count) < share
    numbers[chosen] = dice.integers(0, VALUES, count).astype(np.uint16)[chosen]
    start = draw(st.integers(0, count), "zeros from")
    numbers[start : start + draw(st.integers(0, 40_000), "zeros")] = 0
    return np.append(
        numbers.view(np.uint8), dice.integers(0, 256, draw(st.integers(0, 1)), np.uint8)
    )


@CASES
@given(plain=adversarial(), launch=launches())
def test_any_bytes_come_back(plain: Bytes, launch: tuple[int, int, int]) -> None:
    """Whatever they are, by both decoders and any launch; never more of them than before."""
    table = same(plain, launch)

    assert int(table["nbytes"].sum()) <= len(plain)


def test_blocks_can_be_decoded_from_any_on() -> None:
    """The kernel begins with the block it is told."""
    plain = weights(3, 3 * VALUES + 21).view(np.uint8)
    data, table = encoded(plain)

    rest = plain[2 * BLOCK_BYTES :]
    assert np.array_equal(decode_exp7(data, table, len(rest), (2, 64, 1), first=2), rest)


def kinds() -> dict[str, np.ndarray[Any, Any]]:
    """Five kinds of weights as models have them."""
    dice = np.random.default_rng(5)
    normal = dice.standard_normal((1024, 1024))
    return {
        "normal, 0.02": normal * 0.02,
        "normal, 1 / sqrt(4096)": normal / math.sqrt(4096),
        "normal, as wide as embeddings": normal * 0.7,
        "uniform, 1 / sqrt(4096)": dice.uniform(-1, 1, normal.shape) / math.sqrt(4096),
        "rows of scales of their own": normal * 0.02 * np.exp(dice.normal(0, 0.3, (1024, 1))),
    }


@pytest.mark.parametrize("kind", kinds())
def test_weights_become_small(kind: str) -> None:
    """At most 0.72 of what they were, tables included."""
    plain = bf16(kinds()[kind]).reshape(-1).view(np.uint8)
    table = same(plain)

    assert (int(table["nbytes"].sum()) + table.nbytes) / len(plain) <= 0.72


@CASES
@given(byte=st.integers(0, 1 << 30), bit=st.integers(0, 7), raw=st.booleans())
def test_damage_is_told(byte: int, bit: int, raw: bool) -> None:
    """One bit of a block, or of what its entry says of it, is another: it is not decoded."""
    noise = np.random.default_rng(6).integers(0, 256, BLOCK_BYTES, np.uint8)
    data, table = encoded(noise if raw else weights(4).view(np.uint8))
    changed = [data, table.view(np.uint8).reshape(-1)][byte % 2]
    changed[byte // 2 % len(changed)] ^= 1 << bit

    found = data[: int(table["nbytes"][0])]
    with pytest.raises(Damaged):
        Decoder().decode(table, found, np.zeros(BLOCK_BYTES, np.uint8))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_many_numbers(seed: int) -> None:
    """Ten million numbers of each seed; `benchmarks/codec.py --values 1e9` does a thousand."""
    dice = np.random.default_rng(seed)
    for block in range(150):
        numbers = bf16(dice.standard_normal(VALUES) * 10.0 ** dice.integers(-38, 38))
        chosen = dice.random(VALUES) < dice.choice([0.0, 0.01, 0.1, 0.3])
        numbers[chosen] = dice.integers(0, VALUES, VALUES).astype(np.uint16)[chosen]
        plain = numbers.view(np.uint8)
        data, table = encoded(plain)
        assert np.array_equal(decoded(data, table, len(plain)), plain), f"block {block}"


def test_the_loader_asks_for_aligned_blocks() -> None:
    """Said before a kernel runs."""
    bare = object.__new__(loader.Kernels)
    with pytest.raises(ValueError, match="multiples of 16, not at 0x8"):
        bare.decode_exp7(16, 8, 32, 0, 1)
