"""docs/clients.md: its addresses are those of the dialects, and every recipe is listed."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from appliance.config.schema import Api
from appliance.frontend.fields import IGNORED_HEADER
from appliance.service.front_paths import is_front_path
from tests.prose import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "clients.md").read_text(encoding="utf-8")
ASKED = {
    "OPENAI_BASE_URL": "/chat/completions",
    "ANTHROPIC_BASE_URL": "/v1/messages",
    "OLLAMA_HOST": "/api/chat",
}
"""What a client adds to the value of its variable."""


def test_the_variables_lead_to_endpoints() -> None:
    """At the address where the daemon listens by itself."""
    rows = dict(re.findall(r"^\| \w+ \| `(\w+)`.*\| `(http[^`]+)` \|$", PAGE, re.MULTILINE))

    assert rows.keys() == ASKED.keys()
    for variable, value in rows.items():
        assert urlsplit(value).netloc == str(Api().bind)
        assert is_front_path(urlsplit(value).path + ASKED[variable])


def test_every_recipe_is_listed() -> None:
    folder = DOCS / "recipes"
    index = (folder / "README.md").read_text(encoding="utf-8")
    recipes = {path.name for path in folder.glob("*.md")} - {"README.md"}

    assert [name for name in recipes if f"({name})" not in index] == []
    linked = re.findall(r"\(recipes/([\w-]+\.md)\)", PAGE)
    assert {"continue.md", "aider.md", "langchain.md"} < set(linked) <= recipes | {"README.md"}


def test_the_header_is_the_one_that_is_sent() -> None:
    assert f"`{IGNORED_HEADER}`" in PAGE
