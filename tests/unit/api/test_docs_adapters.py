"""docs/adapters.md is true: its requests that change adapters are answered."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx

from tests.docblocks import code_blocks
from tests.docexamples import ADDRESS
from tests.docshell import check_commands, examples
from tests.unit.api.test_adapter_changes import app, box, client, path  # noqa: F401


async def test_every_request_that_changes_adapters_is_answered(
    client: httpx.AsyncClient,  # noqa: F811
    box: object,  # noqa: F811
    tmp_path: Path,
) -> None:
    """In the order of the page, with the names and places of this test."""
    asked = []
    for block in code_blocks("docs/adapters.md", "sh", containing="adapter"):
        for command, _ in examples(block.text):
            if not command.startswith("curl"):
                check_commands(command)
                continue
            here = command.replace("llama-a", "new").replace("/srv/adapters", str(tmp_path))
            words = shlex.split(here.replace("\\\n", " "))
            method = words[words.index("-X") + 1] if "-X" in words else "POST"
            body = json.loads(words[words.index("-d") + 1]) if "-d" in words else None
            (url,) = [word for word in words if word.startswith(ADDRESS)]
            answer = await client.request(method, url.removeprefix(ADDRESS), json=body)
            assert answer.status_code == 200, f"{command}: {answer.text}"
            await box.daemon.adapters.cleared()  # type: ignore[attr-defined]
            asked.append(re.sub("/api/models/new", "", url.removeprefix(ADDRESS)))

    assert asked == [
        "/adapters",
        "/adapters/legal",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ]
