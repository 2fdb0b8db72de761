"""What a router reads of bodies, in all dialects, and of bodies that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.fleet.calls import Hint
from appliance.fleet.hints import read_hint


def hint(**fields: Any) -> Hint:
    return read_hint(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        {"model": "m", "prompt": "hi"},
        {"model": "m", "input": ["hi"]},
        {"name": "m"},
        {"model": "m", "messages": 7, "user": 7, "system": [{"type": "text"}]},
    ],
)
def test_the_model_is_read(fields: dict[str, Any]) -> None:
    assert hint(**fields).model == "m"


def test_a_conversation_keeps_its_session() -> None:
    """By how it begins: later turns have more messages. Another beginning is another session."""
    turn = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    more = [*turn, {"role": "assistant", "content": "a"}, {"role": "user", "content": "two"}]
    first = hint(model="m", messages=turn).session

    assert first
    assert hint(model="m", messages=more).session == first
    assert hint(model="m", messages=[{"role": "user", "content": "one"}]).session != first
    assert hint(model="m", messages=turn, system="other").session != first


def test_a_client_may_name_its_session() -> None:
    said = {"prompt": "p", "user": "u", "previous_response_id": "r", "prompt_cache_key": "k"}
    assert hint(**said).session == "k"
    del said["prompt_cache_key"]
    assert hint(**said).session == "r"
    del said["previous_response_id"]
    assert hint(**said).session == "u"


def test_a_form_has_its_model_in_a_field() -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        b'name="model"\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
        b"whisper\r\n--b--\r\n"
    )
    assert read_hint(body, b'multipart/form-data; boundary="b"').model == "whisper"
    assert read_hint(body, b"Multipart/Form-Data; boundary=b").model == "whisper"
    assert read_hint(body, b"multipart/form-data") == Hint()


@pytest.mark.parametrize("body", [b"", b"no", b"[]", b"{", b'{"model": {}}', b"[" * 9999, b"\xff"])
def test_what_is_no_request_has_no_hint(body: bytes) -> None:
    assert read_hint(body) == Hint()


@given(st.binary(max_size=200), st.sampled_from([b"", b"multipart/form-data; boundary=b"]))
def test_no_bytes_raise(body: bytes, kind: bytes) -> None:
    assert isinstance(read_hint(body, kind), Hint)
