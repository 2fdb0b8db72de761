"""Items of a conversation are read until the first one that is wrong.

vLLM compares an item of `input` of `/v1/responses` with some sixty kinds, and says of each why the
item is none of it: 2 ms for each wrong item, and more of them than fit into an answer.
"""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import FailFast
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest


class _FirstFault(FailFast):
    __hash__ = object.__hash__  # so that it may be in a union


def stop_at_first_fault() -> None:
    """Change the request model. Before its routes are made, which keep how it was."""
    field = ResponsesRequest.model_fields["input"]
    field.annotation = _quick(field.annotation)
    ResponsesRequest.model_rebuild(force=True)


def _quick(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(map(_quick, get_args(kind)))]  # noqa: UP007  # made here
    return Annotated[kind, _FirstFault()] if get_origin(kind) is list else kind
