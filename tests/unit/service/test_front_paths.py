"""Which paths are for front ends, and which for the core."""

from __future__ import annotations

import pytest

from appliance.service.front_paths import is_front_path, without_root


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/rerank",
    ],
)
def test_what_computes_is_for_front_ends(path: str) -> None:
    assert is_front_path(path)


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/livez", "/v1", "/v1/models", "/v1/messages/batches", "/v1/batches"),
        *("/api/tags", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel"),
    ],
)
def test_the_rest_is_the_cores(path: str) -> None:
    assert not is_front_path(path)


@pytest.mark.parametrize(
    ("path", "root", "meant"),
    [
        ("/llm/v1/models", "/llm", "/v1/models"),
        ("/v1/models", "/llm", "/v1/models"),
        ("/llm", "/llm", "/llm"),
        ("/llms/v1/models", "/llm", "/llms/v1/models"),
        ("/a/b/livez", "/a/b", "/livez"),
        ("/llm/v1/models", "", "/llm/v1/models"),
    ],
)
def test_a_path_below_the_root_is_meant_without_it(path: str, root: str, meant: str) -> None:
    assert without_root(path, root) == meant
