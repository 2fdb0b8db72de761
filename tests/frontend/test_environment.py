"""What a front end writes while all is well: nothing, to standard error and into any folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.platform.seccomp import has_filters
from appliance.service.front_frames import FrontModel
from tests.frontend.small_models import answer, small_models
from tests.frontend.stand_in_core import StandInCore

pytestmark = pytest.mark.asyncio(loop_scope="session")

TURNS: list[dict[str, str]] = [
    {"role": "user", "content": "hello"},
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "and now?"},
]
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"model": "small", "messages": TURNS, "max_tokens": 2}),
    ("/v1/messages", {"model": "small", "messages": TURNS, "max_tokens": 2}),
    ("/v1/responses", {"model": "small", "input": "hello"}),
    ("/v1/embeddings", {"model": "embedder", "input": "hello"}),
    ("/v1/score", {"model": "scorer", "text_1": "a", "text_2": "b"}),
    ("/api/chat", {"model": "small", "messages": TURNS, "stream": False}),
)


def is_sandboxed(pid: int) -> bool:
    """As far as this kernel can do that."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    status = dict(line.split(":\t") for line in lines)
    filtered = "2" if has_filters() else "0"
    return (status["Seccomp"], status["NoNewPrivs"]) == (filtered, "1")


async def test_warnings_that_mean_nothing_here_are_not_reported(tmp_path: Path) -> None:
    """Of no GPU, of templates, of a store without bounds: all of them are as they have to be. Nor
    is a file written, or a process started, where vLLM has no caches yet."""
    models: list[FrontModel] = small_models(tmp_path)
    core = StandInCore(models)
    answer(core)
    log = tmp_path / "errors"
    scratch, caches = tmp_path / "scratch", tmp_path / "caches"
    scratch.mkdir()
    caches.mkdir()
    environment = {
        "TMPDIR": str(scratch),
        "VLLM_CACHE_ROOT": str(caches),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "torch"),
    }
    try:
        with log.open("wb") as errors:
            await core.begin(environment, errors=errors)
        await core.ready()
        assert is_sandboxed(core.pid)
        async with httpx.AsyncClient(base_url=core.url, timeout=None) as http:
            for path, body in ASKED:
                found = await http.post(path, json=body)
                assert found.status_code == 200, found.text
        assert await core.end() == 0
    finally:
        await core.close()
    assert log.read_text(encoding="utf-8") == ""
    assert [*scratch.rglob("*"), *caches.rglob("*")] == []
