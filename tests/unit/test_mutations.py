"""The faults of `tests.mutations` can still be put in, and their tests and their docs exist."""

from __future__ import annotations

import re

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation

DOCS = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
SHARED = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "devices").glob("*.py")]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_has_its_place_and_its_test(mutation: Mutation) -> None:
    """What is to be replaced occurs once; the test is there; the table of the docs names both."""
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    file, *_, function = mutation.test.split("::")
    sources = [(ROOT / file).read_text(encoding="utf-8"), *SHARED]

    assert source.count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert any(re.search(rf"def {function}\(", text) for text in sources)
    assert f"| {mutation.name} | `{function}` |" in DOCS


def test_the_tests_that_the_page_names_exist() -> None:
    """Also those of the findings."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    named = set(re.findall(r"`(test_\w+)`", DOCS))

    assert len(named) > 40
    assert {name for name in named if f"def {name}(" not in sources} == set()


def test_names_are_different() -> None:
    """The command picks faults by words of their names."""
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS)
