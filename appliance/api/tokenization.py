"""vLLM's endpoints that turn text to tokens and back, without a model running."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from appliance.api.jsonanswers import json_answer
from appliance.api.plan import check_token, off_loop
from appliance.api.schemas import (
    DetokenizeRequest,
    TokenizeRequest,
    decode_tokenize,
    parse,
)
from appliance.api.service import Service
from appliance.tokens import Tokenizer


class _Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None = None


class _Text(msgspec.Struct, kw_only=True):
    prompt: str


def tokenization_routes(service: Service) -> list[HTTPRouteHandler]:
    """``/tokenize`` and ``/detokenize``."""

    @post("/tokenize", status_code=200, operation_id="tokenize")
    async def tokenize(request: Request[Any, Any, Any]) -> ASGIResponse:
        body = await request.body()
        asked = decode_tokenize(body)
        card, tokenizer = service.model(asked.model), service.tokenizer(asked.model)
        tokens = await off_loop(len(body), lambda: _tokens(asked, tokenizer))
        answer = _Tokens(count=len(tokens), max_model_len=card.max_context_tokens, tokens=tokens)
        if asked.return_token_strs:
            answer.token_strs = tokenizer.written(tokens)
        return json_answer(answer)

    @post("/detokenize", status_code=200, operation_id="detokenize")
    async def detokenize(request: Request[Any, Any, Any]) -> ASGIResponse:
        body = await request.body()
        asked = parse(body, DetokenizeRequest)
        tokenizer = service.tokenizer(asked.model)
        for token in asked.tokens:
            check_token(token, tokenizer, "tokens")
        text = await off_loop(
            len(body), lambda: tokenizer.decode(asked.tokens, special_tokens=True)
        )
        return json_answer(_Text(prompt=text))

    return [tokenize, detokenize]


def _tokens(asked: TokenizeRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    if asked.messages is None:
        return tokenizer.encode(asked.prompt or "", asked.add_special_tokens is not False)
    return tokenizer.render_chat(
        [message.plain() for message in asked.messages],
        msgspec.to_builtins(asked.tools) or None,
        add_generation_prompt=asked.add_generation_prompt is not False,
        variables=asked.chat_template_kwargs,
    )
