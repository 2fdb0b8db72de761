"""Which models an endpoint can ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from appliance.api.errors import BadRequest
from appliance.api.service import ModelCard
from appliance.vocabulary import Task

_FOR: Final = {
    Task.GENERATE: "generates text",
    Task.EMBED: "makes embeddings",
    Task.SCORE: "makes scores",
}


def check_task(card: ModelCard, tasks: Sequence[Task], api: str) -> None:
    """Raise `BadRequest`, in vLLM's words, for a model that does something else; `api` is what the
    endpoint is called."""
    if card.purpose.task not in tasks:
        raise BadRequest(
            f"model: The model does not support {api} API: {card.id} {_FOR[card.purpose.task]}",
            "model",
            "unsupported_task",
        )
