"""Anthropic's endpoints. A request is put into OpenAI's words and planned like one of those."""

from __future__ import annotations

import uuid
from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from appliance.api.anthropic_replies import MessagesDialect
from appliance.api.anthropic_requests import FIELDS, CountRequest, MessagesRequest
from appliance.api.choices import Choices
from appliance.api.errors import BadRequest
from appliance.api.jsonanswers import json_answer
from appliance.api.plan import encode_chat, plan_chat
from appliance.api.requestids import request_id
from appliance.api.schemas import parse
from appliance.api.service import Service
from appliance.api.stream import answer
from appliance.api.tools import check_reasons, template_tools


def anthropic_routes(service: Service, keep_alive_seconds: float) -> list[HTTPRouteHandler]:
    """The endpoints below ``/v1/messages``."""

    @post("/v1/messages", status_code=200, operation_id="createMessage")
    async def messages(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), MessagesRequest)
        if asked.thinks:
            check_reasons("thinking", service.model(asked.model))
        message_id = f"msg_{uuid.uuid4().hex}"
        try:
            plan = await plan_chat(asked.chat(), service, message_id, fit=True)
        except BadRequest as error:
            raise error.renamed(FIELDS) from error
        dialect = MessagesDialect(
            message_id,
            plan.model,
            plan.prompt_tokens,
            cut=plan.choices[0].sampling.max_tokens < asked.max_tokens,
            request=request_id(request.scope),
        )
        return await answer(
            request.receive,
            Choices.submit(plan, service),
            dialect,
            stream=plan.stream,
            keep_alive_seconds=keep_alive_seconds,
        )

    @post("/v1/messages/count_tokens", status_code=200, operation_id="countMessageTokens")
    async def count_tokens(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), CountRequest)
        tokenizer = service.tokenizer(asked.model)
        chat = asked.chat()
        prompt = await encode_chat(
            chat.messages, tokenizer, template_tools(chat), chat.chat_template_kwargs
        )
        return json_answer({"input_tokens": len(prompt)})

    return [messages, count_tokens]
