"""The ASGI application: routes, error shapes and limits put together."""

from __future__ import annotations

from collections.abc import Callable

from litestar import Litestar

from appliance.api.anthropic import anthropic_routes
from appliance.api.auth import Access, Authentication
from appliance.api.batches import batch_routes
from appliance.api.batchrunner import BatchRunner
from appliance.api.catalogue import catalogue_routes
from appliance.api.config import config_routes, log_routes
from appliance.api.embeddings import embedding_routes
from appliance.api.errorshapes import EXCEPTION_HANDLERS
from appliance.api.events import event_routes
from appliance.api.files import file_routes
from appliance.api.gate import MAX_WAIT_SECONDS, MAX_WAITING, gated
from appliance.api.instances import instance_routes
from appliance.api.keys import key_routes
from appliance.api.models import model_admin_routes
from appliance.api.ollama import ollama_routes
from appliance.api.ollama_catalogue import ollama_catalogue_routes
from appliance.api.ollama_embeddings import ollama_embedding_routes
from appliance.api.openai import generation_routes, model_routes, operator_routes
from appliance.api.openapi import openapi_routes
from appliance.api.options import Options
from appliance.api.policies import policy_routes
from appliance.api.requestids import name_answer
from appliance.api.requests import request_routes
from appliance.api.responses import response_routes
from appliance.api.scoring import scoring_routes
from appliance.api.service import Service
from appliance.api.settings import Settings
from appliance.api.tokenization import tokenization_routes
from appliance.api.tracing import Tracing
from appliance.api.watch import watch_routes

KEEP_ALIVE_SECONDS = 5.0
MAX_BODY_BYTES = 8 * 1024 * 1024


def create_app(
    service: Service,
    *,
    settings: Settings | None = None,
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    max_body_bytes: int = MAX_BODY_BYTES,
    access: Access | None = None,
    max_waiting: int = MAX_WAITING,
    max_wait_seconds: float = MAX_WAIT_SECONDS,
    batches: Callable[[Service, Access], BatchRunner] | None = None,
    traced: bool = False,
) -> Litestar:
    """The API in front of `service`, for any ASGI server.

    Without `settings` there is no configuration to look at or to change.
    While an open stream has nothing to say, it is kept alive every `keep_alive_seconds`. Without
    `access` nobody needs a key; of each key `max_waiting` sequences wait when there is no room, for
    `max_wait_seconds` at most. `batches` makes who carries batches out, as long as the application
    lives (ASGI's lifespan); without it there are none, and no files. `traced` requests know the
    trace that they are part of.
    """
    access = Access() if access is None else access
    service = gated(service, access, max_waiting=max_waiting, max_wait_seconds=max_wait_seconds)
    runner = None if batches is None else batches(service, access)
    return Litestar(
        route_handlers=[
            *generation_routes(service, keep_alive_seconds),
            *response_routes(service, keep_alive_seconds),
            *embedding_routes(service),
            *scoring_routes(service),
            *model_routes(service),
            *tokenization_routes(service),
            *file_routes(runner),
            *batch_routes(runner),
            *anthropic_routes(service, keep_alive_seconds),
            *ollama_routes(service, keep_alive_seconds, fixed=settings is None),
            *ollama_embedding_routes(service),
            *operator_routes(service),
            *policy_routes(service),
            *request_routes(service),
            *instance_routes(service),
            *key_routes(service, access),
            *model_admin_routes(service, settings),
            *([] if settings is None else config_routes(service, settings)),
            *([] if settings is None else catalogue_routes(service, settings)),
            *([] if settings is None else ollama_catalogue_routes(settings)),
            *log_routes(),
            *event_routes(service, keep_alive_seconds),
            *watch_routes(service, keep_alive_seconds),
            *openapi_routes(),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        before_send=[name_answer],
        middleware=[Authentication(access), Options(), *([Tracing()] if traced else [])],
        request_max_body_size=max_body_bytes,
        logging_config=None,
        lifespan=[] if runner is None else [runner.running],
        openapi_config=None,  # handlers read bodies themselves: litestar's would say nothing
    )
