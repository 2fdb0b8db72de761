"""The faults of `tests.mutations` can still be put in, and their tests and their docs exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import mutations
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


def test_words_that_choose_nothing_run_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says so and fails."""
    monkeypatch.setattr(mutations, "run", None)

    assert mutations.main(["capture", "nosuchword"]) == 1
    assert "no fault has all of these words in its name: capture nosuchword" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["failed"], "failed"),
        (["passed"], "MISSED"),
        (["hung", "passed"], "hung"),
        (["hung", "hung"], "slow"),
    ],
)
def test_what_hangs_is_run_without_the_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: list[str], expected: str
) -> None:
    """A machine that is too slow for a test finds no fault."""
    (tmp_path / "source.py").write_text("right", encoding="utf-8")
    left = list(outcomes)
    seen: list[str] = []

    def run(tests: list[str], root: Path) -> str:
        seen.append((root / "source.py").read_text(encoding="utf-8"))
        return left.pop(0)

    monkeypatch.setattr(mutations, "run", run)
    fault = Mutation("a fault", "source.py", "right", "wrong", "test_it")

    assert mutations.look_for(fault, tmp_path) == expected
    assert seen == ["wrong", "right"][: len(outcomes)]
    assert (tmp_path / "source.py").read_text(encoding="utf-8") == "right"


def test_names_are_different() -> None:
    """The command picks faults by words of their names."""
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS)
