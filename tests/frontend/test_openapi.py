"""The generated part of the OpenAPI document is the one that vLLM and our own bodies make."""

from __future__ import annotations

import io
from importlib import resources
from typing import Any

import msgspec
import pytest
from fastapi import UploadFile
from pydantic import TypeAdapter

from appliance.api.openapi.examples import EXAMPLES
from appliance.frontend.app import meant
from appliance.frontend.fields import check, ollama_bodies, request_models
from appliance.frontend.openapi import generated
from appliance.frontend.sound.forms import PATHS
from appliance.service.front_paths import FRONT_PATHS
from appliance.vocabulary import Task

_POSTED = {("post", path) for path in FRONT_PATHS}


def test_the_file_is_up_to_date() -> None:
    """If this fails: `make generate`."""
    written = resources.files("appliance.api.openapi").joinpath("inference.json").read_bytes()

    assert written == generated()


def test_every_front_path_is_described() -> None:
    paths = msgspec.json.decode(generated())["paths"]

    assert paths.keys() == set(FRONT_PATHS)
    posted = {path for path, item in paths.items() if "post" in item and path in FRONT_PATHS}
    assert posted == {path for _, path in EXAMPLES.keys() & _POSTED}


@pytest.mark.parametrize("path", sorted(path for _, path in EXAMPLES.keys() & _POSTED))
def test_examples_are_accepted(path: str) -> None:
    """By the types that bodies are decoded into; nothing in them is ignored."""
    example: Any = msgspec.json.encode(EXAMPLES["post", path])
    body = msgspec.json.decode(example, type=dict[str, msgspec.Raw])

    assert check(path, body, strict=True).ignored == ()
    if (kind := ollama_bodies().get(path)) is not None:
        msgspec.json.decode(example, type=kind)
        return
    kinds = request_models()[meant(path, body, Task.GENERATE)]
    union: Any = kinds[0]
    for other in kinds[1:]:
        union = union | other
    if path in PATHS:  # a form
        fields = EXAMPLES["post", path] | {"file": UploadFile(io.BytesIO())}
        TypeAdapter(union).validate_python(fields)
        return
    TypeAdapter(union).validate_json(example)
