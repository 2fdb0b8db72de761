"""A part of `tests.hostile.bit_flips`, which flips a million bits."""

from __future__ import annotations

import random
from pathlib import Path

from tests.hostile.bit_flips import flip_descriptions, flip_logs


def test_flipped_bits_of_logs(tmp_path: Path) -> None:
    flip_logs(tmp_path, 300, random.Random(1))


def test_flipped_bits_of_descriptions(tmp_path: Path) -> None:
    """A description that says something else than what was written is never believed."""
    found = flip_descriptions(tmp_path, 300, random.Random(1))
    assert found == {"set aside": 300}
