"""Every block of code in our documents is run by a test, is checked, or says why it is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.docblocks import Block, blocks_of, pages, taken
from tests.docchecks import check, check_indented

BLOCKS = [block for page in pages() for block in blocks_of(page)]
FENCED = [block for block in BLOCKS if not block.indented]


def kind(block: Block) -> str:
    """How it is known to be right."""
    if block.place in taken():
        return "run"
    return "checked" if block.reason is None else "marked"


@pytest.mark.parametrize("block", FENCED, ids=lambda block: block.place)
def test_a_block_is_run_or_checked_or_says_why_not(block: Block) -> None:
    if block.place in taken():
        assert block.reason is None, f"{taken()[block.place]} runs it: take the comment away"
    elif block.reason is None:
        check(block)
    else:
        assert block.reason, "say why: <!-- not run: reason -->"


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.indented], ids=lambda block: block.place
)
def test_an_indented_block_has_no_commands(block: Block) -> None:
    """It would be checked by nothing."""
    check_indented(block)


def test_most_blocks_are_run_or_checked(
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    """The report has how many there are of each kind."""
    counts = Counter(map(kind, FENCED))
    for name, count in counts.items():
        record_testsuite_property(f"blocks that are {name}", count)

    assert counts["run"] > counts["checked"] > counts["marked"] > 0
