"""Clients in JavaScript: `client.test.mjs`, and the recipes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

from tests.clients.conftest import BUILD, ROOT, Appliance
from tests.docblocks import Block, code_blocks
from tests.parrot import ANSWER
from tests.patience import PATIENCE_SECONDS


def node(source: str, url: str, *options: str) -> str:
    """Runs a module beside its packages, as node looks for them there; returns what it wrote."""
    script = BUILD / "clients-js/script.mjs"
    script.write_text(source, encoding="utf-8")
    done = subprocess.run(
        ["node", *options, script], env=os.environ | {"APPLIANCE": url},
        capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_clients(appliance: Appliance) -> None:
    source = (ROOT / "tests/clients/client.test.mjs").read_text(encoding="utf-8")

    node(source, appliance.url, "--test")


@pytest.mark.parametrize(
    "block",
    [
        *code_blocks("docs/recipes/openai.md", "js"),
        *code_blocks("docs/recipes/anthropic.md", "js"),
        *code_blocks("docs/recipes/ollama.md", "js"),
        *code_blocks("docs/recipes/ai-sdk.md", "js"),
    ],
    ids=lambda block: block.place,
)
def test_recipe(appliance: Appliance, recipe: Callable[..., str], block: Block) -> None:
    assert ANSWER in node(recipe([block]), appliance.url)
