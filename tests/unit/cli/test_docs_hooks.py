"""docs/hooks.md is what the specifications of the hooks say, and every hook has all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.cli.docs import hooks
from appliance.cli.docs.hook_examples import Examples
from appliance.cli.docs.hooks import HookDoc, generate, hook_docs
from appliance.errors import PolicyError
from appliance.hookspecs import HOOKS, PolicySpec
from appliance.policies import validation
from tests.docblocks import code_blocks

DOCS = Path(__file__).parents[3] / "docs"


def test_the_file_is_not_stale() -> None:
    """`make generate` writes docs/hooks.md anew."""
    assert (DOCS / "hooks.md").read_text(encoding="utf-8") == generate(), "run `make generate`"


def test_the_file_shows_every_signature_and_example() -> None:
    """The examples are those that tests/unit/testing/test_kit.py runs."""
    shown = {block.text.rstrip("\n") for block in code_blocks("docs/hooks.md", "python")}

    assert {part for doc in hook_docs() for part in (doc.signature, doc.example)} <= shown


def test_every_hook_has_all_its_parts() -> None:
    """Signature, when it is asked, views, answer, what is valid, example, shipped policies."""
    docs = hook_docs()

    assert [doc.name for doc in docs] == list(HOOKS)
    for doc in docs:
        missing = [part for part in doc.__struct_fields__ if not getattr(doc, part)]
        assert set(missing) <= {"answers"}, doc.name
        assert f"def {doc.name}(" in doc.signature
        assert "Costs" in doc.views
        assert doc.example.startswith("@hookimpl\n")
        assert f"### {doc.name}\n" in generate()


@pytest.mark.parametrize(
    ("owner", "part"), [(PolicySpec, "asked"), (validation, "valid"), (Examples, "example_about")]
)
def test_a_part_that_is_missing_is_an_error(
    owner: object, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the hook and the part."""
    monkeypatch.setattr(getattr(owner, "evict"), "__doc__", None)  # noqa: B009

    with pytest.raises(PolicyError, match=f"hook evict has no {part}"):
        hook_docs()


def test_a_hook_that_no_policy_implements_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could look at how it is meant."""
    monkeypatch.setattr(hooks, "shipped_policies", lambda: iter(()))

    with pytest.raises(PolicyError, match="hook place has no shipped"):
        hook_docs()


def test_a_long_example_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hide the point."""
    monkeypatch.setattr(hooks, "LONGEST_EXAMPLE", 3)

    with pytest.raises(PolicyError, match="the example of scale has 4 lines"):
        hook_docs()


def test_every_link_leads_somewhere() -> None:
    """To a heading of the page, or to a file."""
    text = generate()
    titles = [line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")]
    headings = {re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles}

    links = re.findall(r"\]\(([^)]+)\)", text)

    assert len(links) > 50
    for link in links:
        if link.startswith("#"):
            assert link[1:] in headings, link
        else:
            assert (DOCS / link).exists(), link


def test_every_word_of_a_question_is_explained() -> None:
    """Views, answers, and what they are made of, with their fields."""
    text = generate()

    for doc in hook_docs():
        for name in (*doc.views, *doc.answers):
            assert re.search(rf"\n### {name}( \(answer\))?\n", text), name
    assert "\n### Slo\n" in text
    assert "    group: InstanceId" not in text
    assert "    group: int | None = None" in text
    assert "- `deadline -> float`: when its first token is due." in text
    assert isinstance(hook_docs()[0], HookDoc)
