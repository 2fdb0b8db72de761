"""From a decoded request to the sequences to generate: token ids, sampling, what must fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from appliance.api.errors import BadRequest
from appliance.api.guiding import guide_of
from appliance.api.schemas import (
    MAX_PROMPTS,
    ChatRequest,
    Common,
    CompletionRequest,
    Message,
    NamedTool,
)
from appliance.api.service import Interpretation, ModelCard, Service, SubmitRequest
from appliance.api.tasks import check_task
from appliance.api.tools import (
    check_choice,
    guide_of_chat,
    has_to_be_read,
    interpret,
    template_tools,
)
from appliance.engines.protocol import Guide, GuideRefused, Sampling
from appliance.tokens import Tokenizer
from appliance.vocabulary import RequestClass, Task

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
    interpretation: Interpretation | None = None
    """Who reads the answers for reasoning and tool calls, if they may hold any; to be ended."""
    reasons: bool = False
    """The model is one that reasons: its tokens for that are told apart."""
    named_tool: bool = False
    """The client says which tool is called: that is no finish of its own."""


async def plan_chat(
    request: ChatRequest, service: Service, completion_id: str, *, fit: bool = False
) -> Plan:
    """With `fit`, the limit on tokens is a wish that the end of the context may cut short.

    Raises `ModelNotFound`, `BadRequest` and the errors of chat templates.
    """
    card, tokenizer = service.model(request.model), service.tokenizer(request.model)
    check_task(card, [Task.GENERATE], "Chat Completions")
    tools = template_tools(request)
    check_choice(request, card)
    prompt = await encode_chat(request.messages, tokenizer, tools, request.chat_template_kwargs)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens or request.max_tokens
    plan = _plan(
        request, card, tokenizer, [prompt], "messages", max_tokens, logprobs, completion_id, fit
    )
    if not has_to_be_read(request, card):
        return await _guided(plan, guide_of(request), service)
    interpretation = await interpret(request, prompt, service)
    plan = msgspec.structs.replace(
        plan,
        interpretation=interpretation,
        reasons=card.reasoning_parser is not None,
        named_tool=isinstance(request.tool_choice, NamedTool),
    )
    try:
        return await _guided(plan, guide_of_chat(request, interpretation), service)
    except BaseException:
        interpretation.end()
        raise


async def encode_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Token ids of a conversation, up to where its answer begins; `tools` as templates know them,
    `variables` are further ones of theirs.

    Raises the errors of chat templates.
    """
    length = sum(message.characters for message in messages) + len(str(tools or ""))

    def render() -> tuple[int, ...]:
        plain = [message.plain() for message in messages]
        return tokenizer.render_chat(plain, tools, variables=variables)

    return await off_loop(length, render)


async def plan_completion(
    request: CompletionRequest, service: Service, completion_id: str, *, fit: bool = False
) -> Plan:
    """With `fit`, the limit on tokens is a wish that the end of the context may cut short, and
    there is none but that when none is given.

    Raises `ModelNotFound` and `BadRequest`.
    """
    card, tokenizer = service.model(request.model), service.tokenizer(request.model)
    check_task(card, [Task.GENERATE], "Completions")
    sources = sources_of(request.prompt)
    length = sum(len(source) for source in sources)
    prompts = await off_loop(
        length, lambda: [encode_source(source, tokenizer) for source in sources]
    )
    plan = _plan(
        request,
        card,
        tokenizer,
        prompts,
        "prompt",
        request.max_tokens or (None if fit else COMPLETION_TOKENS),
        request.logprobs,
        completion_id,
        fit,
    )
    return await _guided(plan, guide_of(request), service)


async def _guided(plan: Plan, asked: tuple[str, Guide] | None, service: Service) -> Plan:
    """The plan with the guide that a field asks for, which can be followed."""
    if asked is None:
        return plan
    field, guide = asked
    try:
        await service.check_guide(plan.model, guide)
    except GuideRefused as refused:
        raise BadRequest(f"{field}: {refused}", field, "invalid_guide") from refused
    replace = msgspec.structs.replace
    choices = [
        replace(choice, sampling=replace(choice.sampling, guide=guide)) for choice in plan.choices
    ]
    return replace(plan, choices=tuple(choices))


def _plan(
    request: Common,
    card: ModelCard,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[int, ...]],
    source: str,
    max_tokens: int | None,
    logprobs: int | None,
    completion_id: str,
    fit: bool,
) -> Plan:
    _check_vocabulary(request, tokenizer)
    n = request.n or 1
    flex = request.service_tier == "flex"
    request_class = RequestClass.BATCH if flex else RequestClass.INTERACTIVE
    if len(prompts) * n > MAX_PROMPTS:
        raise BadRequest(f"{source}: more than {MAX_PROMPTS} choices in one request", source)
    choices: list[SubmitRequest] = []
    for prompt in prompts:
        room = _room(prompt, card, None if fit else max_tokens, source)
        for i in range(n):
            seed = None if request.seed is None else request.seed + i
            sampling = _sampling(request, min(max_tokens or room, room), logprobs, seed)
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
    if len(choices) > 1:
        together = sum(len(one.prompt) + one.sampling.max_tokens for one in choices)
        choices = [msgspec.structs.replace(one, together_tokens=together) for one in choices]
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
            check_token(token, tokenizer, field)


def check_token(token: int, tokenizer: Tokenizer, field: str) -> None:
    """Raises `BadRequest` for a token that the vocabulary has not."""
    if not 0 <= token < tokenizer.vocab_size:
        raise BadRequest(f"{field}: token id {token} is not in the vocabulary", field)


def sources_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The four forms of `prompt` as one: a list of texts or of token id lists."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise BadRequest("prompt: texts, token ids and lists of them cannot be mixed", "prompt")
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def encode_source(source: str | list[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of one prompt. Raises `BadRequest`."""
    if isinstance(source, str):
        return tokenizer.encode(source)
    for token in source:
        check_token(token, tokenizer, "prompt")
    return tuple(source)


async def off_loop(length: int, work: Callable[[], _Result]) -> _Result:
    """Run `work` here, or in a thread when it is long: other streams must not wait for it."""
    return work() if length <= _LONG_TEXT else await asyncio.to_thread(work)
