"""Which paths are for front ends, and which for the core."""

from __future__ import annotations

import pytest

from appliance.frontpaths import is_front_path


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/resp_1",
        "/v1/responses/resp_1/cancel",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/rerank",
    ],
)
def test_what_computes_is_for_front_ends(path: str) -> None:
    assert is_front_path(path)


@pytest.mark.parametrize(
    "path",
    ["", "/", "/livez", "/v1/models", "/v1/messages/batches", "/v1/batches", "/api/tags", "/v1"],
)
def test_the_rest_is_the_cores(path: str) -> None:
    assert not is_front_path(path)
