"""A part of `tests.hostile.bit_flips`, which flips a million bits."""

from __future__ import annotations

import random
from pathlib import Path

from tests.hostile.bit_flips import kinds


def test_flipped_bits(tmp_path: Path) -> None:
    """Of each kind of file; each kind checks what became of it."""
    draw = random.Random(1)
    rare, often = kinds(tmp_path)
    for flip in rare * 50 + often * 200:
        flip(draw)
