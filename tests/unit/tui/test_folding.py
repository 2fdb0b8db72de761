"""Lines that are folded to a width: nothing of them is lost, and nothing sticks out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tui.drawing.canvas import Line, plain
from tui.drawing.folding import LEAST_WIDTH, folded

TEXTS = st.text("ab -", max_size=40)
LINES = st.lists(st.tuples(TEXTS, st.sampled_from(["", "bold"])), min_size=1, max_size=3)


@given(LINES, st.integers(LEAST_WIDTH, 60))
def test_all_of_a_line_is_there(line: Line, width: int) -> None:
    """In its order and styles, but for spaces."""
    lines = folded([line], width)

    assert all(len(plain(one)) <= width for one in lines)
    pieces = [piece for one in lines for piece in one]
    for style in ("", "bold"):
        before, after = ("".join([t for t, s in some if s == style]) for some in (line, pieces))
        assert after.replace(" ", "") == before.replace(" ", "")


def test_what_follows_a_name_is_below_its_value() -> None:
    line: Line = [("  Ctrl-C  ", "bold"), ("cancel the answer, quit elsewhere", "")]

    assert [plain(one) for one in folded([line], 30)] == [
        "  Ctrl-C  cancel the answer, ",
        "          quit elsewhere",
    ]
    assert folded([line], LEAST_WIDTH - 1) == [line]
