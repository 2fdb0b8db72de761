"""The application of a front end: vLLM's, once for all models, behind the core's decisions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any, Final, TypeAlias, TypeGuard, cast
from urllib.parse import parse_qs

import msgspec
from fastapi import FastAPI
from litestar import Litestar
from litestar.types import ASGIApp, Receive, Send
from starlette.datastructures import State
from vllm.entrypoints.anthropic.api_router import router as anthropic_router
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.responses.api_router import router as responses_router
from vllm.entrypoints.pooling.classify.api_router import router as classify_router
from vllm.entrypoints.pooling.embed.api_router import router as embed_router
from vllm.entrypoints.pooling.pooling.api_router import router as pooling_router
from vllm.entrypoints.pooling.scoring.api_router import router as scoring_router
from vllm.entrypoints.scale_out.render.api_router import router as render_router
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize.api_router import attach_router as attach_tokenize_router

from appliance.frontend.answers import AnswerGuard, Headers
from appliance.frontend.calls import Call, current
from appliance.frontend.connections import CONNECTION, IS_BLOCKED, STREAM_BEGUN
from appliance.frontend.core import CallRefused, Core
from appliance.frontend.counts import (
    check_messages,
    check_texts,
    check_tokenized,
    check_tokens,
    check_values,
)
from appliance.frontend.fields import IGNORED_HEADER, check
from appliance.frontend.images import (
    NO_IMAGES,
    Images,
    ImageTurns,
    fetch,
    find,
    in_thread,
    threads,
)
from appliance.frontend.remote import elsewhere
from appliance.frontend.serving.input_tokens import router as input_tokens_router
from appliance.frontend.serving.model_fronts import FrontNotBuilt, ModelFronts, UnknownModel
from appliance.frontend.serving.speech import router as speech_router
from appliance.frontend.serving.stored import recall
from appliance.frontend.serving.vllm_errors import VllmErrors
from appliance.frontend.sound import chats, forms
from appliance.http.body_budget import BodiesFull, BodyBudget, client_of
from appliance.http.errors import ApiError, as_refused
from appliance.http.request_ids import request_id
from appliance.service.front_frames import (
    DECIDING_HEADERS,
    LARGE_BYTES,
    FrontModel,
    Refused,
    Welcome,
)
from appliance.service.front_paths import is_front_path
from appliance.vocabulary import ModelName, RequestClass, Task

log = logging.getLogger(__name__)

LEAVE_SECONDS: Final = 1.0
"""What the application has to end by itself when its client left."""
_METHODS: Final = b"POST, OPTIONS"
OLLAMA: Final = "/api/"
_DECIDING: Final = frozenset(name.encode() for name in DECIDING_HEADERS)
RESPONSES: Final = "/v1/responses"
INVOCATIONS: Final = "/invocations"
TOKENIZER_INFO: Final = "/tokenizer_info"

_TASKS: Final[dict[str, tuple[str, frozenset[Task]]]] = {
    path: (api, frozenset(tasks))
    for paths, api, tasks in (
        (
            ("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/chat/completions/render"),
            "Chat Completions",
            (Task.GENERATE,),
        ),
        (("/v1/completions", "/v1/completions/render"), "Completions", (Task.GENERATE,)),
        (
            ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/render"),
            "Responses",
            (Task.GENERATE,),
        ),
        (
            ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render"),
            "Messages",
            (Task.GENERATE,),
        ),
        (("/v1/embeddings", "/v2/embed"), "Embeddings", (Task.EMBED,)),
        (("/pooling",), "Pooling", (Task.EMBED, Task.SCORE)),
        (("/classify",), "Classification", (Task.SCORE,)),
        (("/score", "/v1/score"), "Score", (Task.EMBED, Task.SCORE)),
        (forms.PATHS[:1], "Transcriptions", (Task.TRANSCRIPTION,)),
        (forms.PATHS[1:], "Translations", (Task.TRANSCRIPTION,)),
        (("/rerank", "/v1/rerank", "/v2/rerank"), "Rerank", (Task.EMBED, Task.SCORE)),
    )
    for path in paths
}
"""What an endpoint is called, and the tasks of the models that it can ask; others ask any."""

_PAIRS: Final = frozenset({"text_1", "data_1", "queries"})
"""One of them is in every body that asks how well texts match."""

_DOES: Final = {
    Task.GENERATE: "generates text",
    Task.EMBED: "makes embeddings",
    Task.SCORE: "makes scores",
    Task.TRANSCRIPTION: "makes text of sound",
}


Fields: TypeAlias = dict[str, Any]
"""Of a body, not decoded but for `model`."""


class _Models:
    """Takes the place of the application for vLLM's handlers: its state is one model's."""

    def __init__(self, state: State) -> None:
        self.state = state


class FrontEnd:
    """Answers all requests that this process gets, as ASGI."""

    def __init__(
        self,
        core: Core,
        welcome: Welcome,
        fronts: ModelFronts,
        ollama: Litestar,
    ) -> None:
        """`ollama` answers the paths of its dialect."""
        self._core = core
        self._welcome = welcome
        self._fronts = fronts
        self._ollama = ollama
        self.bodies = BodyBudget(welcome.max_bodies_bytes)
        self._turns = ImageTurns()
        self.draining = False
        """Whether every answer closes its connection."""
        self.calls = 0
        """Those that are not answered."""
        self.large = 0
        """Those of them with a large body."""
        self.on_over: Callable[[], None] = lambda: None
        """Called whenever a call is over."""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        large = _declared_bytes(scope) >= LARGE_BYTES
        self.calls += 1
        self.large += large
        try:
            await self._serve(scope, receive, send)
        finally:
            self.calls -= 1
            self.large -= large
            self.on_over()

    async def _serve(self, scope: Any, receive: Receive, send: Send) -> None:
        name = request_id(scope)
        common: Headers = [(b"x-request-id", name.encode()), (b"request-id", name.encode())]
        if self.draining:
            common.append((b"connection", b"close"))
        if not is_front_path(scope["path"]):
            common.append((b"connection", b"close"))
            await _refuse(scope, send, common, _MISDIRECTED)
            return
        if scope["method"] == "OPTIONS":  # what browsers ask so is answered before it comes here
            await _empty(send, [*common, (b"allow", _METHODS)])
            return
        client = scope.get("client")
        deciding = tuple(
            (key.decode(), value.decode("latin-1"))
            for key, value in scope["headers"]
            if key in _DECIDING
        )
        try:
            call = await self._core.enter(
                scope["method"],
                scope["path"],
                None if client is None else client[0],
                deciding,
                scope["state"][CONNECTION],
            )
        except CallRefused as error:
            await _refuse(scope, send, common, error.refused)
            return
        try:
            with self.bodies.hold(call.key, scope) as held:
                call.keep = held.keep
                await self._answer(call, scope, held.receiving(receive), send, common)
        finally:
            self._core.leave(call)

    async def _answer(
        self, call: Call, scope: Any, receive: Receive, send: Send, common: Headers
    ) -> None:
        answer = AnswerGuard(
            scope,
            send,
            call,
            headers=common,
            keep_alive_seconds=self._welcome.keep_alive_seconds,
            is_blocked=scope["state"][IS_BLOCKED],
            on_reading=lambda reads: self._core.reading(call, reads=reads),
            on_stream=lambda event: scope["state"][STREAM_BEGUN](call.number, event),
        )
        token = current.set(call)
        try:
            body = await _read_body(scope, receive, self._welcome.max_body_bytes)
            if body is None:
                return  # the client left before its request was whole
            gone = asyncio.Event()
            watch = asyncio.create_task(_watch(receive, gone))
            try:
                await self.run(call, scope, cast(Send, answer.send), body, gone)
            finally:
                watch.cancel()
            if call.given_up.is_set():
                await answer.give_up()
            answer.close()
            if call.background:
                await asyncio.wait(call.background)
        except (Refuse, CallRefused) as error:
            await answer.refuse(error.refused)
        except BodiesFull as error:
            await answer.refuse(as_refused(error, call.number))
        finally:
            answer.close()
            current.reset(token)

    async def run(
        self, call: Call, scope: Any, send: Send, body: bytes, gone: asyncio.Event
    ) -> None:
        """Answer a call whose body is read; `gone` says that its client left. Ends early when the
        core gives its stream up. Raises `Refuse` for what cannot be handed on."""
        work = asyncio.create_task(self._run(call, scope, send, body, gone))
        left = asyncio.create_task(gone.wait())
        given_up = asyncio.create_task(call.given_up.wait())
        try:
            await asyncio.wait((work, left, given_up), return_when=asyncio.FIRST_COMPLETED)
            if gone.is_set() and not work.done():
                # vLLM hears that the client left, and aborts what it asked for.
                await asyncio.wait((work,), timeout=LEAVE_SECONDS)
        finally:
            left.cancel()
            given_up.cancel()
            work.cancel()
        ended = gone.is_set() or call.given_up.is_set()
        await asyncio.gather(work, return_exceptions=ended)

    async def _run(
        self, call: Call, scope: Any, send: Send, body: bytes, gone: asyncio.Event
    ) -> None:
        path: str = scope["path"]
        sent = NO_IMAGES
        if path.startswith(OLLAMA):
            await self._run_ollama(call, scope, send, body, gone)
            return
        if path == TOKENIZER_INFO:
            asked = parse_qs(scope["query_string"].decode("latin-1")).get("model", [None])[-1]
            state = await self._state(call, _here(call, path, self._model(call, asked)))
        elif scope["method"] != "POST":
            message = f"{path} is asked with POST"
            raise Refuse(refused(call, 405, "method_not_allowed", message))
        elif path in forms.PATHS:
            state = await self._read_form(call, scope, body)
        else:
            try:
                fields = fields_of(body)
            except NotJson as error:
                raise Refuse(refused(call, 400, "invalid_json", str(error))) from error
            check_size(call, path, fields)
            if fields is None or not _is_name(asked := fields.get("model")):
                state = _no_model()
                path = meant(path, {}, Task.GENERATE)
            else:
                model = self._model(call, asked)
                path = meant(path, fields, model.task, pools_tokens=model.pools_tokens)
                if model.remote:
                    await self._forward(call, scope, path, fields, body, model, send, gone)
                    return
                check_task(call, path, model)
                sent = _images(call, path, fields, model)
                call.chat_sounds = _sounds(call, path, fields, model)
                check_counts(call, path, fields, model, sent)
                reasons = model.reasoning_parser is not None
                task = model.embedding_task
                body = self._check(call, path, fields, body, reasons=reasons, embedding_task=task)
                if asked is None:
                    body = _naming(model.name, body)
                state = await self._state(call, model)
                await self._recall(call, path, fields, state)
        send = cast(Send, VllmErrors(scope, send).send)
        inner: Any = {
            **scope,
            "path": path,
            "app": _Models(state),
            "headers": _with_request_id(scope),
            "state": dict(scope["state"]),
        }
        async with self._turn(call, scope, sent, send) as send:
            await vllm_stack()(inner, _body_then(body, gone), send)

    async def _run_ollama(
        self, call: Call, scope: Any, send: Send, body: bytes, gone: asyncio.Event
    ) -> None:
        path, sent = scope["path"], NO_IMAGES
        with contextlib.suppress(NotJson):  # Ollama's words for it come from where it is read
            fields = fields_of(body)
            check_size(call, path, fields)
            if (known := self._known(call, fields)) is not None and known.remote:
                await self._forward(call, scope, path, fields, body, known, send, gone)
                return
            sent = _images(call, path, fields, known)
            body = self._check(call, path, fields, body, reasons=True)
        async with self._turn(call, scope, sent, send) as send:
            await self._ollama(scope, _body_then(body, gone), send)

    @contextlib.asynccontextmanager
    async def _turn(self, call: Call, scope: Any, sent: Images, send: Send) -> AsyncIterator[Send]:
        """The turn of a call whose body has images or sound, and what its answer is sent with:
        the client takes its time to read that, so the turn is over when it begins. Raises
        `Refuse`."""
        form = call.form
        if not (sent.images or call.chat_sounds) and form is None:
            yield send
            return

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.body":
                call.on_submit()
            await send(message)

        try:
            sent = await fetch(self._core, call, sent)
            async with self._turns.turn(call, client_of(call.key, scope), sent):
                if form is not None:
                    call.keep(await in_thread(call, threads, forms.look_at, form))
                if call.chat_sounds:
                    look = in_thread(call, threads, chats.look_at, call.chat_sounds)
                    call.sounds, size_bytes = await look
                    call.keep(size_bytes)
                yield cast(Send, sending)
        except ApiError as error:
            raise Refuse(as_refused(error, call.number)) from error

    async def _read_form(self, call: Call, scope: Any, body: bytes) -> State:
        """Have the call keep the form that it sends; the state of the model that it names. Raises
        `Refuse`."""
        path: str = scope["path"]
        try:
            form = forms.read(_header(scope, b"content-type") or "", body)
            model = self._model(call, form.model)
            if model.remote:
                raise elsewhere.wrong_dialect(path, model)
            check_task(call, path, model)
            form = forms.checked(form)
            form = form._replace(fields={"model": [model.name]} | form.fields)
        except ApiError as error:
            raise Refuse(as_refused(error, call.number)) from error
        self._check(call, path, form.as_body(), b"", reasons=False)
        call.form = form
        return await self._state(call, model)

    async def _forward(
        self,
        call: Call,
        scope: Any,
        path: str,
        fields: Fields | None,
        body: bytes,
        model: FrontModel,
        send: Send,
        gone: asyncio.Event,
    ) -> None:
        """Have the server of a model answer. Raises `Refuse`, `CallRefused`."""
        fields = fields or {}
        translation: elsewhere.AnyTranslation | None = None
        try:
            check_task(call, elsewhere.checked_path(path, model), model)
            asked = fields.get("model") or model.name
            if path in elsewhere.TRANSLATED:
                translation = self._translated(call, path, fields, body, model, asked)
                path, fields = translation.path, translation.fields
            if translation is not None and translation.placed:
                await elsewhere.send_json(send, translation.placed)
                return
            frame = elsewhere.frame(call, scope, path, fields, model, asked)
        except ApiError as error:
            raise Refuse(as_refused(error, call.number)) from error
        await elsewhere.answer(self._core, call, frame, send, gone, translation)

    def _translated(
        self, call: Call, path: str, fields: Fields, body: bytes, model: FrontModel, asked: str
    ) -> elsewhere.AnyTranslation:
        """A request of another dialect than OpenAI's. Raises `Refuse`, `ApiError`."""
        check_messages(path, fields, model)
        welcome = self._welcome
        translation = elsewhere.translated(
            path,
            self._check(call, path, fields, body, reasons=True),
            asked,
            strict=welcome.strict,
            keep_alive_seconds=welcome.keep_alive_seconds,
        )
        if translation.ignored:
            call.headers.append((IGNORED_HEADER, ", ".join(translation.ignored)))
        return translation

    def _known(self, call: Call, fields: Fields | None) -> FrontModel | None:
        """The model that a body names, if the call may ask it."""
        asked = {} if fields is None else fields.get("model")
        if not _is_name(asked):
            return None
        with contextlib.suppress(UnknownModel):
            model = self._fronts.resolve(asked)
            return model if call.allows(model.name) else None
        return None

    async def _recall(self, call: Call, path: str, fields: Fields, state: State) -> None:
        """Fetch the stored response that a body goes on from. Raises `Refuse` if there is none."""
        if not path.startswith(RESPONSES) or "previous_response_id" not in fields:
            return
        try:
            previous = msgspec.json.decode(fields["previous_response_id"], type=str | None)
        except msgspec.ValidationError:  # vLLM says what is wrong
            return
        if previous is None:
            return
        if not await recall(call, self._core, state.openai_serving_responses, previous):
            message = f"Response with id '{previous[:100]}' not found."
            code, name = "previous_response_not_found", "previous_response_id"
            raise Refuse(refused(call, 404, code, message, name))

    def _check(
        self, call: Call, path: str, fields: Fields | None, body: bytes, **known: Any
    ) -> bytes:
        """The body that is to be read in place of `body`; what is ignored of it is named in the
        call's headers. What is `known` of the model is as `check` has it. Raises `Refuse` for what
        would change the answer."""
        if fields is None:
            return body
        raw = {name: one for name, one in fields.items() if isinstance(one, msgspec.Raw)}
        try:
            checked = check(path, raw, strict=self._welcome.strict, **known)
        except ApiError as error:
            raise Refuse(as_refused(error, call.number)) from error
        if checked.header:
            call.headers.append((IGNORED_HEADER, checked.header))
        if checked.flex:
            call.request_class = RequestClass.BATCH
        if checked.body is None:
            return body
        named = {"model": fields["model"]} if "model" in fields else {}
        return msgspec.json.encode(named | checked.body)

    def _model(self, call: Call, asked: str | None) -> FrontModel:
        """The model that a call may ask. Raises `Refuse`."""
        try:
            model = self._fronts.resolve(asked)
            if not call.allows(model.name):
                raise UnknownModel(asked)
        except UnknownModel as error:
            status, code = (400, "model_missing") if asked is None else (404, "model_not_found")
            raise Refuse(refused(call, status, code, str(error), "model")) from error
        return model

    async def _state(self, call: Call, model: FrontModel) -> State:
        try:
            return (await self._fronts.get(model)).state
        except FrontNotBuilt as error:
            message = f"the model {model.name} cannot be served: {error}"
            raise Refuse(refused(call, 500, "model_not_served", message, "model")) from error


def check_task(call: Call, path: str, model: FrontModel) -> None:
    """Raise `Refuse` for a model that does not do what an endpoint asks."""
    api, tasks = _TASKS.get(path, ("", frozenset(Task)))
    if model.task not in tasks:
        message = f"The model does not support {api} API: {model.name} {_DOES[model.task]}"
        message += forms.remedy(path, model.task)
        raise Refuse(refused(call, 400, "unsupported_task", message, "model"))


def _here(call: Call, path: str, model: FrontModel) -> FrontModel:
    """The model, which is one of this box. Raises `Refuse` for one of another server."""
    if model.remote:
        raise Refuse(as_refused(elsewhere.wrong_dialect(path, model), call.number))
    return model


def check_size(call: Call, path: str, fields: Fields | None) -> None:
    """Raise `Refuse` for more values than a body may have, whatever its endpoint and model."""
    try:
        check_values(path, fields or {})
    except ApiError as error:
        raise Refuse(as_refused(error, call.number)) from error


def check_counts(
    call: Call, path: str, fields: Fields, model: FrontModel, sent: Images = NO_IMAGES
) -> None:
    """Raise `Refuse` for more of anything than a body may list, before time is spent on it."""
    try:
        check_messages(path, fields, model)
        check_tokens(path, fields, model)
        besides = sent.characters + chats.characters(call.chat_sounds)
        check_tokenized(path, fields, model, besides=besides)
        if Task.GENERATE not in _TASKS.get(path, ("", frozenset(Task)))[1]:
            check_texts(fields, model)
    except ApiError as error:
        raise Refuse(as_refused(error, call.number)) from error


def _images(call: Call, path: str, fields: Fields | None, model: FrontModel | None) -> Images:
    """The images in a body, if its model reads images. Raises `Refuse`."""
    if fields is None or model is None or not model.images:
        return NO_IMAGES
    try:
        return Images(tuple(find(path, fields)), model.images)
    except ApiError as error:
        raise Refuse(as_refused(error, call.number)) from error


def _sounds(
    call: Call, path: str, fields: Fields, model: FrontModel
) -> tuple[chats.ChatSound, ...]:
    """The sounds in a body, if its model reads them in chats. Raises `Refuse`."""
    if not model.sounds:
        return ()
    try:
        return chats.find(path, fields, model.sounds)
    except ApiError as error:
        raise Refuse(as_refused(error, call.number)) from error


def meant(path: str, fields: Fields, task: Task, *, pools_tokens: bool = False) -> str:
    """The endpoint that a body is for: that of `path`, or under SageMaker's one path for all, as
    in vLLM, the one whose fields it has and whose task the model does."""
    if path != INVOCATIONS:
        return path
    if task is Task.GENERATE:
        return "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    if "query" in fields and "documents" in fields:
        return "/rerank"
    if not fields.keys().isdisjoint(_PAIRS):
        return "/score"
    if pools_tokens or not fields.keys().isdisjoint(("task", "data")):
        return "/pooling"
    return "/v1/embeddings" if task is Task.EMBED else "/classify"


class Refuse(Exception):
    """The call is answered with a refusal of our own."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.refused = refused


def refused(call: Call, status: int, code: str, message: str, param: str | None = None) -> Refused:
    return Refused(call=call.number, status=status, code=code, message=message, param=param)


_MISDIRECTED: Final = Refused(
    call=0,
    status=421,
    code="misdirected_request",
    message="ask for this path on a new connection; this one is closed",
)
"""Only for requests that are sent while earlier ones are answered (pipelining): a connection with
one request at a time goes back to the core."""


# --- vLLM's application --------------------------------------------------------------------------


@cache
def vllm_application() -> FastAPI:
    """vLLM's routes that front ends answer, with its handlers of errors; without a model."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for router in (
        chat_router,
        completion_router,
        responses_router,
        anthropic_router,
        embed_router,
        pooling_router,
        classify_router,
        scoring_router,
        render_router,
        input_tokens_router,
        speech_router,
    ):
        app.include_router(router)
    app.state.args = Namespace(enable_tokenizer_info_endpoint=True)
    attach_tokenize_router(app)
    init_exception_handler(app)
    return app


@cache
def vllm_stack() -> ASGIApp:
    """The same as ASGI, below where it would put itself into the scope."""
    return cast(ASGIApp, vllm_application().build_middleware_stack())


@cache
def _no_model() -> State:
    """For bodies that name no model because they are no JSON objects: vLLM says what is wrong."""
    return State({"args": Namespace(log_error_stack=False)})


class NotJson(ValueError):
    """A body is not JSON. What only Python's reader takes (NaN, lone surrogates) is not, either:
    its fields could not be checked."""


def fields_of(body: bytes) -> Fields | None:
    """The top-level fields of a body, `model` decoded; None: it is no JSON object, which vLLM
    says. Raises `NotJson`."""
    try:
        fields: Fields = dict(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
        if (model := fields.get("model")) is not None:
            fields["model"] = msgspec.json.decode(cast(msgspec.Raw, model))
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotJson(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise NotJson("the body is nested too deeply") from error
    return fields


def _naming(model: ModelName, body: bytes) -> bytes:
    """A body that names its model: some of vLLM's request models demand that."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(fields | {"model": model})


def _is_name(model: object) -> TypeGuard[str | None]:
    return model is None or isinstance(model, str)


# --- ASGI ----------------------------------------------------------------------------------------


async def _read_body(scope: Any, receive: Receive, most_bytes: int) -> bytes | None:
    """The whole body; None if the client left. Raises `Refuse` for one that is too large."""
    if _declared_bytes(scope) > most_bytes:
        raise Refuse(_too_large(most_bytes))
    parts: list[bytes] = []
    size = 0
    while True:
        message: Any = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > most_bytes:
            raise Refuse(_too_large(most_bytes))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _declared_bytes(scope: Any) -> int:
    """The size of a body, where its head says it; else 0."""
    declared = _header(scope, b"content-length") or ""
    return int(declared) if declared.isdigit() else 0


def _too_large(most_bytes: int) -> Refused:
    return Refused(
        call=0,
        status=413,
        code="request_too_large",
        message=f"the body is larger than {most_bytes} bytes",
    )


def _body_then(body: bytes, gone: asyncio.Event) -> Receive:
    """What the application receives: the body, then that the client left."""
    read = False

    async def receive() -> Any:
        nonlocal read
        if not read:
            read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return cast(Receive, receive)


async def _watch(receive: Receive, gone: asyncio.Event) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()


async def _refuse(scope: Any, send: Send, headers: Headers, refused: Refused) -> None:
    answer = AnswerGuard(
        scope,
        send,
        Call(0),
        headers=headers,
        keep_alive_seconds=0.0,
        is_blocked=lambda: False,
        on_reading=lambda _: None,
        on_stream=lambda _: None,
    )
    await answer.refuse(refused)


async def _empty(send: Any, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _header(scope: Any, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return cast(bytes, value).decode("latin-1")
    return None


def _with_request_id(scope: Any) -> list[tuple[bytes, bytes]]:
    """The headers, with the id that vLLM then makes its own ids of."""
    others = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
    return [*others, (b"x-request-id", request_id(scope).encode())]
