"""Prompts that are too long are cut as Ollama cuts them: the oldest messages of a chat go first.

System messages and the last message stay. If they alone are too long, the prompt loses its
beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError

from appliance.frontend.ollama.errors import TOO_LONG, OllamaError
from appliance.frontend.ollama.requests import FittedChat, FittedCompletion, most_prompt_tokens

_TOO_LONG_PARAMETERS = ("input_text", "input_tokens")
"""How vLLM's refusals of long prompts are marked."""


def is_too_long(error: Exception) -> bool:
    """Whether vLLM refused a request because its prompt is too long."""
    if isinstance(error, VLLMClientError):
        return getattr(error, "parameter", None) in _TOO_LONG_PARAMETERS
    return isinstance(error, ValueError) and str(error).startswith("Input length (")


async def shortened(request: FittedChat, renderer: Any) -> FittedChat:
    """`request` without its oldest messages, so that it fits, where `renderer` is the model's
    `OnlineRenderer`. Renders as many prompts as the number of messages has binary digits."""
    starts = _starts(request.messages)
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits(_from(request, starts[middle]), renderer):
            high = middle
        else:
            low = middle + 1
    chosen = _from(request, starts[low])
    if not await _fits(chosen, renderer):
        chosen.truncate_prompt_tokens = -1
        chosen.truncation_side = "left"
    return chosen


def _starts(messages: Sequence[Any]) -> list[int]:
    """Where a shortened chat may begin: with a question, or, in the last question's turn, with a
    step of the model. Templates refuse other beginnings."""
    questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
    turn = questions[-1] if questions else 0
    steps = [i for i in range(turn + 1, len(messages)) if messages[i]["role"] == "assistant"]
    last = len(messages) - 1
    return [start for start in questions if start > 0] + [s for s in steps if s < last] + [last]


def _from(request: FittedChat, start: int) -> FittedChat:
    """A copy with the messages from `start` on, and the system's."""
    kept = [
        message
        for i, message in enumerate(request.messages)
        if i >= start or message["role"] == "system"
    ]
    copy: FittedChat = request.model_copy(update={"messages": kept})
    return copy


async def _fits(request: FittedChat, renderer: Any) -> bool:
    """Whether it can be rendered and is short enough. A template may refuse a beginning."""
    try:
        prompt = await prompt_tokens(request, renderer)
    except (OllamaError, VLLMClientError, ValueError, TypeError):
        return False
    return len(prompt) <= most_prompt_tokens(request, renderer.model_config)


async def prompt_tokens(request: FittedChat | FittedCompletion, renderer: Any) -> list[int]:
    """The prompt that vLLM makes of a request, which stays as it is."""
    copy = request.model_copy(deep=True)  # parsers of tools adjust what they render
    if isinstance(copy, FittedChat):
        rendered = await renderer.render_chat(copy)
        if not isinstance(rendered, ErrorResponse):
            rendered = rendered[1]
    else:
        rendered = await renderer.render_completion(copy)
    if isinstance(rendered, ErrorResponse):
        raise OllamaError(rendered.error.code, rendered.error.message)
    return list(rendered[0]["prompt_token_ids"])


async def continued(
    request: FittedChat | FittedCompletion,
    context: Sequence[int],
    renderer: Any,
    *,
    truncates: bool,
) -> None:
    """Put the tokens of an earlier conversation in front of the prompt of `request`.

    Raises `OllamaError` if that is too long and the client does not want it cut.
    """
    tokenizer = renderer.renderer.get_tokenizer()
    if max(context) >= len(tokenizer):
        raise OllamaError(400, f"context: the model has no token {max(context)}")
    prompt = await prompt_tokens(request, renderer)
    if prompt and prompt[0] == tokenizer.bos_token_id:
        del prompt[0]
    whole = [*context, *prompt]
    most = most_prompt_tokens(request, renderer.model_config)
    if len(whole) > most and not truncates:
        raise OllamaError(400, TOO_LONG)
    if isinstance(request, FittedChat):
        # How vLLM is given a chat's prompt that is rendered already.
        request.kv_transfer_params = {"prompt_token_ids": whole[-most:]}
    else:
        request.prompt = whole[-most:]
