"""The ASGI application: routes, error shapes and limits put together."""

from __future__ import annotations

from collections.abc import Callable

from litestar import Litestar

from appliance.access.admission import Admission
from appliance.access.auth import Access, Authentication
from appliance.api.admin.adapters import adapter_routes
from appliance.api.admin.catalog import catalogue_routes
from appliance.api.admin.config import config_routes, log_routes
from appliance.api.admin.events import event_routes
from appliance.api.admin.instances import instance_routes
from appliance.api.admin.keys import key_routes
from appliance.api.admin.models import model_admin_routes
from appliance.api.admin.organizations import organization_routes
from appliance.api.admin.policies import policy_routes
from appliance.api.admin.requests import request_routes
from appliance.api.admin.usage import usage_routes
from appliance.api.admin.watch import watch_routes
from appliance.api.batch.files import file_routes
from appliance.api.batch.message_routes import message_batch_routes
from appliance.api.batch.routes import batch_routes
from appliance.api.batch.runner import BatchRunner
from appliance.api.held_bodies import HeldBodies
from appliance.api.key_view import gated
from appliance.api.model_list import model_routes
from appliance.api.ollama.catalog import ollama_catalogue_routes
from appliance.api.openapi.document import openapi_routes
from appliance.api.openapi.options import Options
from appliance.api.probes import operator_routes
from appliance.api.responses import response_routes
from appliance.gateway.responses import StoredResponses
from appliance.http.body_budget import BodyBudget
from appliance.http.error_formats import EXCEPTION_HANDLERS
from appliance.http.request_ids import name_answer
from appliance.service.front_frames import BodyActivity
from appliance.service.interface import Service
from appliance.service.settings import Settings
from appliance.usage.ledger import Ledger

KEEP_ALIVE_SECONDS = 5.0
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_BODIES_BYTES = 128 * 1024 * 1024


def create_app(
    service: Service,
    *,
    settings: Settings | None = None,
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    max_body_bytes: int = MAX_BODY_BYTES,
    access: Access | None = None,
    admission: Admission | None = None,
    batches: BatchRunner | None = None,
    responses: StoredResponses | None = None,
    max_bodies_bytes: int = MAX_BODIES_BYTES,
    bodies: Callable[[], list[BodyActivity]] = list,
    ledger: Ledger | None = None,
) -> Litestar:
    """What the core itself answers, for any ASGI server: all but what front ends do.

    Without `settings` there is no configuration to look at or to change, without `access` no key is
    needed. An open stream that has nothing to say is kept alive every `keep_alive_seconds`.
    `admission` knows the requests that wait for their turn. `batches` run as long as the
    application lives (ASGI's lifespan); without them there are no files. `responses` are those that
    front ends stored. Bodies that are held at once have `max_bodies_bytes` at most; `bodies` are
    those that front ends hold. The `ledger` says what keys used.
    """
    budget = BodyBudget(max_bodies_bytes)
    access = Access() if access is None else access
    admission = Admission(service, access) if admission is None else admission
    responses = StoredResponses() if responses is None else responses
    service = gated(service, access, admission, ledger)
    return Litestar(
        route_handlers=[
            *model_routes(service),
            *file_routes(batches),
            *batch_routes(batches),
            *message_batch_routes(batches),
            *response_routes(responses, keep_alive_seconds),
            *ollama_catalogue_routes(service, settings),
            *operator_routes(service),
            *policy_routes(service),
            *request_routes(service, lambda: [*budget.coming(), *bodies()]),
            *instance_routes(service),
            *key_routes(service, access),
            *organization_routes(access),
            *usage_routes(ledger, access),
            *model_admin_routes(service, settings),
            *([] if settings is None else config_routes(service, settings)),
            *([] if settings is None else catalogue_routes(service, settings)),
            *([] if settings is None else adapter_routes(service, settings)),
            *log_routes(),
            *event_routes(service, keep_alive_seconds),
            *watch_routes(service, keep_alive_seconds),
            *openapi_routes(),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        before_send=[name_answer],
        middleware=[Authentication(access), HeldBodies(budget), Options()],
        request_max_body_size=max_body_bytes,
        logging_config=None,
        lifespan=[] if batches is None else [batches.running],
        openapi_config=None,  # handlers read bodies themselves: litestar's would say nothing
    )
