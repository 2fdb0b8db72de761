"""Amounts as people read them, narrow enough for a column; and bars made of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"


def size(count: float) -> str:
    """Bytes: `512B`, `1.5GiB`."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop()
    unit = units[-1]
    return f"{count:.3g}{unit}" if count < 1000 else f"{count:.0f}{unit}"


def duration(seconds: float | None) -> str:
    """`850µs`, `12ms`, `3.4s`, `5m10s`, `2h05m`, `3d04h`."""
    if seconds is None:
        return ""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}µs"
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 48 else f"{hours // 24}d{hours % 24:02}h"


def rate(per_second: float) -> str:
    """`0`, `0.25`, `12`, `3.4k`."""
    if per_second >= 1000:
        return f"{per_second / 1000:.1f}k"
    return f"{per_second:.0f}" if per_second >= 10 else f"{per_second:.2g}"


def share(part: float | None) -> str:
    """0 to 1 as `0%` to `100%`; 100 % only if nothing is missing."""
    if part is None:
        return ""
    tenths = int(part * 1000 + 1e-6)
    if tenths >= 1000:
        return "100%"
    return f"{tenths / 10:.1f}%" if tenths >= 990 else f"{tenths // 10}%"


def sparkline(values: Sequence[float]) -> str:
    """A column for each value, as high as it is relative to the highest."""
    most = max(values, default=0.0)
    if most <= 0:
        return BLOCKS[0] * len(values)
    steps = len(BLOCKS) - 1
    return "".join([BLOCKS[-(-int(value / most * steps * 1000) // 1000)] for value in values])


def divide(width: int, parts: Iterable[float]) -> list[int]:
    """`width` cells among parts, in proportion: all of them, and one at least for a part that is
    not nothing as long as there are as many."""
    sizes = list(parts)
    total = sum(sizes)
    if total <= 0 or width <= 0:
        return [0] * len(sizes)
    cells = [min(1, width) if part > 0 else 0 for part in sizes]
    while sum(cells) > width:  # more parts than cells: the smallest go without
        cells[min((i for i, c in enumerate(cells) if c), key=sizes.__getitem__)] = 0
    spare = width - sum(cells)
    wanted = [
        max(0.0, part / total * width - cell) for part, cell in zip(sizes, cells, strict=True)
    ]
    wish = sum(wanted) or 1.0
    given = [int(spare * want / wish) for want in wanted]
    left = spare - sum(given)
    largest = sorted(range(len(sizes)), key=lambda i: (given[i] - spare * wanted[i] / wish, i))
    for index in largest[:left]:
        given[index] += 1
    return [cell + more for cell, more in zip(cells, given, strict=True)]
