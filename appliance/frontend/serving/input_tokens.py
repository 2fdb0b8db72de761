"""``POST /v1/responses/input_tokens``, which OpenAI has and vLLM lacks: the length of a prompt."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

router = APIRouter()


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: ResponsesRequest, raw_request: Request) -> Any:
    """How many tokens a request has, those of the stored response that it goes on from included."""
    serving = raw_request.app.state.openai_serving_responses
    previous = serving.response_store.get(request.previous_response_id)
    rendered = await serving._render_resolved_response_inputs(request, previous)
    if isinstance(rendered, ErrorResponse):
        return JSONResponse(rendered.model_dump(mode="json"), rendered.error.code)
    tokens = len(rendered.engine_input["prompt_token_ids"])
    return {"object": "response.input_tokens", "input_tokens": tokens}
