"""Amounts as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui.drawing.amounts import divide, duration, rate, share, size, sparkline


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (size(0), "0B"),
        (size(1023), "1023B"),
        (size(1536), "1.5KiB"),
        (size(80 << 30), "80GiB"),
        (size(3 << 50), "3072TiB"),
        (duration(None), ""),
        (duration(0.00085), "850µs"),
        (duration(0.012), "12ms"),
        (duration(3.44), "3.4s"),
        (duration(59), "59s"),
        (duration(310), "5m10s"),
        (duration(7500), "2h05m"),
        (duration(273600), "3d04h"),
        (rate(0), "0"),
        (rate(0.25), "0.25"),
        (rate(12.3), "12"),
        (rate(3400), "3.4k"),
        (share(None), ""),
        (share(1.0), "100%"),
        (share(0.9999), "99.9%"),
        (share(0.983), "98%"),
        (share(0.0), "0%"),
        (sparkline([0, 1, 2, 4, 8]), " ▁▂▄█"),
        (sparkline([0, 0]), "  "),
        (sparkline([]), ""),
    ],
)
def test_amounts(shown: str, expected: str) -> None:
    """Short, with their unit, and never better than they are."""
    assert shown == expected


@given(st.integers(0, 200), st.lists(st.integers(0, 10**12), max_size=12))
def test_cells_are_divided(width: int, parts: list[int]) -> None:
    """All of them, none for nothing, and whoever has something is seen if there is room."""
    cells = divide(width, parts)

    assert len(cells) == len(parts)
    assert sum(cells) == (width if any(parts) else 0)
    assert all(cell == 0 for cell, part in zip(cells, parts, strict=True) if part == 0)
    there = [cell for cell, part in zip(cells, parts, strict=True) if part]
    assert len(there) > width or all(there)
