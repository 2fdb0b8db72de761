"""Lists of several boxes as one."""

from __future__ import annotations

import json
from typing import Any

from appliance.fleet.calls import Answer
from appliance.fleet.catalogues import loads, merged


def answer(box: str, body: object, status: int = 200) -> Answer:
    return Answer(
        box=box,
        status=status,
        headers=((b"content-type", b"application/json"), (b"content-length", b"1")),
        body=json.dumps(body).encode(),
    )


def test_a_model_that_two_have_is_listed_once() -> None:
    lists = [
        answer("b", {"models": [{"name": "y:latest", "of": "b"}, {"name": "z:latest"}]}),
        answer("a", {"models": [{"name": "y:latest", "of": "a"}]}),
    ]
    whole = merged("/api/tags", lists)

    assert json.loads(whole.body)["models"] == [
        {"name": "y:latest", "of": "a"},
        {"name": "z:latest"},
    ]
    assert whole.headers == ((b"content-type", b"application/json"),)


def test_anthropic_list_says_its_ends() -> None:
    def page(*names: str) -> dict[str, Any]:
        return {
            "data": [{"id": name} for name in names],
            "has_more": False,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }

    whole = merged("/v1/models", [answer("a", page("m")), answer("b", page("k"))])
    assert json.loads(whole.body) == page("k", "m")
    assert json.loads(merged("/v1/models", [answer("a", page())]).body) == page()


def test_boxes_that_refuse_are_left_out() -> None:
    """If all do, the client gets a refusal; if none answers, none."""
    refused, silent = answer("a", {"error": "no"}, 401), Answer(box="c", status=0)
    listed = answer("b", {"data": [{"id": "m"}]})
    assert json.loads(merged("/v1/models", [refused, silent, listed]).body)["data"] == [{"id": "m"}]
    assert merged("/v1/models", [silent, refused]).status == 401
    assert merged("/v1/models", [silent]).status == 0
    assert merged("/v1/models", [answer("a", {"data": 7})]).status == 200


def test_loads_have_a_row_for_each_box() -> None:
    rows = json.loads(loads([answer("b", {"waiting": 3}), Answer(box="a", status=0)]))["boxes"]
    assert rows == [
        {"box": "a", "status": 0, "load": None},
        {"box": "b", "status": 200, "load": {"waiting": 3}},
    ]
