"""From a decoded request to the sequences to generate: token ids, sampling, what must fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from appliance.api.errors import BadRequest
from appliance.api.schemas import MAX_PROMPTS, ChatRequest, Common, CompletionRequest
from appliance.api.service import ModelCard, Service, SubmitRequest
from appliance.engines.protocol import Sampling
from appliance.tokens import Tokenizer
from appliance.vocabulary import RequestClass

_LONG_TEXT = 16_384
"""Characters above which encoding leaves the event loop's thread."""

_Result = TypeVar("_Result")

COMPLETION_TOKENS = 16
"""Tokens of a plain completion when the client does not say: OpenAI's default."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one HTTP request asks for: `choices` sequences, in order of their index."""

    model: str
    tokenizer: Tokenizer
    choices: tuple[SubmitRequest, ...]
    prompt_tokens: int
    """Tokens of all prompts, each counted once however many choices it has."""
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool


async def plan_chat(request: ChatRequest, service: Service, completion_id: str) -> Plan:
    """Raises `ModelNotFound`, `BadRequest` and the errors of chat templates."""
    card, tokenizer = service.model(request.model), service.tokenizer(request.model)
    messages = [message.plain() for message in request.messages]
    length = sum(len(message["content"]) for message in messages)
    prompt = await _off_loop(length, lambda: tokenizer.render_chat(messages))
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens or request.max_tokens
    return _plan(
        request, card, tokenizer, [prompt], "messages", max_tokens, logprobs, completion_id
    )


async def plan_completion(request: CompletionRequest, service: Service, completion_id: str) -> Plan:
    """Raises `ModelNotFound` and `BadRequest`."""
    card, tokenizer = service.model(request.model), service.tokenizer(request.model)
    sources = _prompts(request.prompt)
    length = sum(len(source) for source in sources)
    prompts = await _off_loop(length, lambda: [_encode(source, tokenizer) for source in sources])
    return _plan(
        request,
        card,
        tokenizer,
        prompts,
        "prompt",
        request.max_tokens or COMPLETION_TOKENS,
        request.logprobs,
        completion_id,
    )


def _plan(
    request: Common,
    card: ModelCard,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[int, ...]],
    source: str,
    max_tokens: int | None,
    logprobs: int | None,
    completion_id: str,
) -> Plan:
    _check_vocabulary(request, tokenizer)
    n = request.n or 1
    flex = request.service_tier == "flex"
    request_class = RequestClass.BATCH if flex else RequestClass.INTERACTIVE
    if len(prompts) * n > MAX_PROMPTS:
        raise BadRequest(f"{source}: more than {MAX_PROMPTS} choices in one request", source)
    choices: list[SubmitRequest] = []
    for prompt in prompts:
        room = _room(prompt, card, max_tokens, source)
        for i in range(n):
            seed = None if request.seed is None else request.seed + i
            sampling = _sampling(request, max_tokens or room, logprobs, seed)
            name = completion_id if len(prompts) * n == 1 else f"{completion_id}-{len(choices)}"
            choices.append(
                SubmitRequest(
                    id=name,
                    model=request.model,
                    prompt=prompt,
                    sampling=sampling,
                    request_class=request_class,
                )
            )
    stop = request.stop or ()
    return Plan(
        model=request.model,
        tokenizer=tokenizer,
        choices=tuple(choices),
        prompt_tokens=sum(len(prompt) for prompt in prompts),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        return_token_ids=bool(request.return_token_ids),
    )


def _room(prompt: tuple[int, ...], card: ModelCard, max_tokens: int | None, source: str) -> int:
    """Tokens that may follow `prompt`. Raises `BadRequest` when those asked for do not fit."""
    if not prompt:
        raise BadRequest(f"{source}: the prompt has no tokens", source)
    room = card.max_context_tokens - len(prompt)
    if room < (max_tokens or 1):
        raise BadRequest(
            f"This model's maximum context length is {card.max_context_tokens} tokens, but "
            f"{len(prompt)} tokens in the {source} and {max_tokens or 1} for the completion "
            "were asked for.",
            source,
            "context_length_exceeded",
        )
    return room


def _sampling(request: Common, max_tokens: int, logprobs: int | None, seed: int | None) -> Sampling:
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest("min_tokens: more than max_tokens", "min_tokens")
    given = {
        name: value
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        if (value := getattr(request, name)) is not None
    }
    if request.repetition_penalty is not None:
        given["repetition_penalty"] = request.repetition_penalty
    return Sampling(
        max_tokens=max_tokens,
        top_k=max(0, request.top_k or 0),
        seed=seed,
        logit_bias=request.logit_bias or None,
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=logprobs,
        **given,
    )


def _check_vocabulary(request: Common, tokenizer: Tokenizer) -> None:
    for field in ("logit_bias", "stop_token_ids"):
        for token in getattr(request, field) or ():
            _check_token(token, tokenizer, field)


def _check_token(token: int, tokenizer: Tokenizer, field: str) -> None:
    if not 0 <= token < tokenizer.vocab_size:
        raise BadRequest(f"{field}: token id {token} is not in the vocabulary", field)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The four forms of `prompt` as one: a list of texts or of token id lists."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise BadRequest("prompt: texts, token ids and lists of them cannot be mixed", "prompt")
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def _encode(source: str | list[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(source, str):
        return tokenizer.encode(source)
    for token in source:
        _check_token(token, tokenizer, "prompt")
    return tuple(source)


async def _off_loop(length: int, work: Callable[[], _Result]) -> _Result:
    """Run `work` here, or in a thread when it is long: other streams must not wait for it."""
    return work() if length <= _LONG_TEXT else await asyncio.to_thread(work)
