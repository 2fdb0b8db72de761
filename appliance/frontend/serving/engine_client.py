"""What vLLM's `AsyncLLM` takes for its engine: the core, asked over the link."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from contextvars import Context, ContextVar
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakValueDictionary

from vllm import SamplingParams
from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.multimodal.cache.base import MultiModalCache
from vllm.tasks import SupportedTask
from vllm.utils.async_utils import cancel_task_threadsafe
from vllm.utils.collection_utils import as_list
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine import FinishReason as EngineFinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from appliance.engines.vllm.messages import (
    MAX_REQUEST_BYTES,
    BadMessage,
    decode_output,
    encode_guide,
    encode_request,
)
from appliance.engines.vllm.pooling import (
    MAX_POOLED_BYTES,
    TooMuchPooled,
    check_size,
    supported_tasks,
)
from appliance.frontend.calls import Call, current
from appliance.frontend.core import Core, RequestRefused
from appliance.frontend.serving.single_tokens import Collector, split
from appliance.service.front_frames import (
    MAX_TOGETHER_BYTES,
    FrontModel,
    Output,
    Refused,
    Submit,
)
from appliance.vocabulary import FinishReason, RequestId, Task

log = logging.getLogger(__name__)

_FINISHED: Final = {
    FinishReason.STOP: EngineFinishReason.STOP,
    FinishReason.LENGTH: EngineFinishReason.LENGTH,
    FinishReason.CANCELLED: EngineFinishReason.ABORT,
    FinishReason.ERROR: EngineFinishReason.ERROR,
}


_OTHER_BYTES: Final = 1 << 20
"""Of a request with images or sounds, besides these."""

_AT_ONCE: Final = 128
"""Outputs that vLLM looks at before other tasks go on: where a stop string ended a request, the
core receives that before the answer goes on."""

MAX_LISTED_TOKENS: Final = 1 << 18
"""That the sequences of a call list together: more than any vocabulary has. Each choice has
lists of its own here, in the core and in the worker, some 100 bytes for a token."""


class TooManyListed(ValueError):
    """The sequences of a call list too many tokens; the message says which fields do."""

    def __init__(self) -> None:
        super().__init__(
            "stop_token_ids, logit_bias, allowed_token_ids and bad_words have more than "
            f"{MAX_LISTED_TOKENS} tokens for all choices of the request: list fewer, or ask for "
            "fewer choices (n)"
        )


class MediaTooLarge(ValueError):
    """The prepared images or sounds of a request are more than the core takes; the message says
    so."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class NotAvailable(NotImplementedError):
    """An engine's method that has no meaning where the core schedules."""


class CoreRefusal(GracefulHTTPError):  # type: ignore[misc]
    """The core refuses a request; vLLM's handlers answer with its status and message."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message, _known_status(refused.status))


def is_refusal(record: logging.LogRecord) -> bool:
    """Whether a record of the log is about a refusal of the core, which is no fault here."""
    known = record.exc_info  # False in asyncio's reports without an exception
    return isinstance(known[1], CoreRefusal) if known else False


def _known_status(status: int) -> HTTPStatus:
    """vLLM takes registered statuses only; 499 (an operator cancelled the request) is none."""
    try:
        return HTTPStatus(status)
    except ValueError:
        return HTTPStatus.BAD_REQUEST if status < 500 else HTTPStatus.INTERNAL_SERVER_ERROR


class EngineClient(EngineCoreClient):  # type: ignore[misc]
    """One model's requests to the core, and their outputs."""

    engine_ranks_managed: Final = (0,)

    def __init__(self, core: Core, model: FrontModel, config: ModelConfig) -> None:
        self._core = core
        self._model = model
        self._config = config
        self.tasks: Final = supported_tasks(model.task, config)
        """vLLM's names for what the model can do."""
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._stops: dict[RequestId, frozenset[int]] = {}
        """Of each request the tokens that end it, besides the model's own end."""
        self._calls: WeakValueDictionary[RequestId, Call] = WeakValueDictionary()
        """Of each request whose call is not over."""
        self.processor: OutputProcessor | None = None
        """vLLM's, which knows the streams; set as soon as it exists."""
        self.resources = SimpleNamespace(engine_dead=False)

    # --- what AsyncLLM asks ----------------------------------------------------------------------

    async def get_supported_tasks_async(self) -> tuple[SupportedTask, ...]:
        return self.tasks

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Returns when the core has admitted the request. Raises `CoreRefusal`."""
        call = current.get()
        try:
            self._check_pooled(call, request)
            _check_listed(call, request, self._siblings(request.request_id))
            _check_media(request, self._siblings(request.request_id))
            submit = self._submit_of(call, request)
            if call.one_by_one:
                self._keep_apart(request.request_id)
            if request.sampling_params is not None:
                self._stops[request.request_id] = _stop_tokens(request.sampling_params)
            if (state := self._state(request.request_id)) is not None:
                self._calls[request.request_id] = call
                call.states[request.request_id] = state
            await self._core.submit(call, submit, self)
        except BaseException as error:
            self._drop(request.request_id)
            if isinstance(error, RequestRefused):
                raise CoreRefusal(error.refused) from error
            if isinstance(error, MediaTooLarge):
                raise VLLMValidationError(str(error), parameter=error.parameter) from error
            if isinstance(error, BadMessage | TooManyListed | TooMuchPooled):
                raise VLLMValidationError(str(error)) from error
            raise

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """A stop string ended the requests: what `AsyncLLM` aborts itself."""
        for request in request_ids:
            self._stops.pop(request, None)
            call = self._calls.get(request)
            if call is not None:
                detokenizer = call.states[request].detokenizer
                self._core.stop(call, request, detokenizer.num_output_tokens())

    async def get_output_async(self) -> EngineCoreOutputs:
        await asyncio.sleep(0)  # other tasks go on, also while more is there
        return await self._outputs.get()

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing of the model's was started in this process."""

    def abort(self, requests: list[RequestId], reason: FinishReason) -> None:
        """Have the core end requests."""
        for request in requests:
            self._stops.pop(request, None)
        self._core.abort(requests, reason)

    # --- what the core says ----------------------------------------------------------------------

    def deliver(self, outputs: list[Output]) -> None:
        made: list[EngineCoreOutput] = []
        for output in outputs:
            if output.details:
                made += self._detailed(output)
            elif self._one_by_one(output.request):
                made += split(self._plain(output))
            else:
                made.append(self._plain(output))
            if output.finished is not None:
                self._stops.pop(output.request, None)
        now = time.monotonic()
        for start in range(0, len(made), _AT_ONCE):
            some = made[start : start + _AT_ONCE]
            self._outputs.put_nowait(EngineCoreOutputs(outputs=some, timestamp=now))

    def fail(self, request: RequestId, refused: Refused) -> None:
        """End the stream of a request that had begun with an error of the core's words."""
        assert self.processor is not None
        state = self.processor.request_states.get(request)
        if state is None:
            return
        state.queue.put(CoreRefusal(refused))
        self._drop(request if state.parent_req is None else state.parent_req.request_id)

    def _plain(self, output: Output) -> EngineCoreOutput:
        reason = None if output.finished is None else _FINISHED[output.finished]
        stop = None
        if reason is EngineFinishReason.STOP and output.tokens:
            stops = self._stops.get(output.request, frozenset())
            stop = output.tokens[-1] if output.tokens[-1] in stops else None
        return EngineCoreOutput(
            request_id=output.request,
            new_token_ids=output.tokens,
            finish_reason=reason,
            stop_reason=stop,
        )

    def _detailed(self, output: Output) -> list[EngineCoreOutput]:
        try:
            made = [decode_output(detail) for detail in output.details]
        except BadMessage as error:
            log.error(
                "an output cannot be read: %s", error, extra={"fields": {"id": output.request}}
            )
            self.abort([output.request], FinishReason.ERROR)
            return [_end(output.request, EngineFinishReason.ERROR)]
        for one in made:
            one.request_id = output.request
        if output.finished is not None and made[-1].finish_reason is None:
            made[-1].finish_reason = _FINISHED[output.finished]
        return made

    # --- details ---------------------------------------------------------------------------------

    def _one_by_one(self, request: RequestId) -> bool:
        call = self._calls.get(request)
        return call is not None and call.one_by_one

    def _keep_apart(self, request: RequestId) -> None:
        assert self.processor is not None
        state = self.processor.request_states.get(request)
        if state is not None and isinstance(state.queue, Collector):
            state.queue.keep_apart()

    def _submit_of(self, call: Call, request: EngineCoreRequest) -> Submit:
        sampling, state = request.sampling_params, self._state(request.request_id)
        prompt = tuple(request.prompt_token_ids or ())
        max_tokens = 0
        if sampling is not None:
            room = max(self._model.max_context - len(prompt), 1)
            max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        return Submit(
            call=call.number,
            request=request.request_id,
            model=self._model.name,
            asked="" if request.lora_request is None else request.lora_request.lora_name,
            prompt=prompt,
            max_tokens=max_tokens,
            body=encode_request(request),
            guide=_guide(sampling),
            together_tokens=self._siblings(request.request_id) * (len(prompt) + max_tokens),
            request_class=call.request_class,
            images=_media_tokens(request, self._model.task),
            counts_prompt=state is None or state.request_index == 0,
        )

    def _check_pooled(self, call: Call, request: EngineCoreRequest) -> None:
        """Raise `TooMuchPooled` if all that is pooled for the call takes too much memory, before
        this is computed."""
        if request.pooling_params is None:
            return
        tokens = len(request.prompt_token_ids or ())
        size = check_size(self._config, request.pooling_params, tokens)
        call.pooled_bytes += size
        if call.pooled_bytes > MAX_POOLED_BYTES:
            raise TooMuchPooled(
                f"what is pooled for all prompts of the request takes more than {MAX_POOLED_BYTES} "
                "bytes: ask for fewer at once"
            )

    def _state(self, request: RequestId) -> RequestState | None:
        """vLLM's; None if the request was dropped, as another one of its prompt was refused."""
        assert self.processor is not None
        return self.processor.request_states.get(request)

    def _siblings(self, request: RequestId) -> int:
        """How many sequences are asked for at once with this one; 0: it is alone."""
        state = self._state(request)
        parent = None if state is None else state.parent_req
        return 0 if parent is None else int(parent.sampling_params.n)

    def _drop(self, request: RequestId) -> None:
        """Forget a request, or all sequences of one, here and in the core."""
        assert self.processor is not None
        self._stops.pop(request, None)
        others = self.processor.abort_requests([request], internal=True)
        self.abort(others, FinishReason.CANCELLED)


def _name_what_is_missing() -> None:
    """All other methods of an engine's client say by name that they are not available."""

    def unavailable(name: str) -> Callable[..., Any]:
        def refuse(*args: object, **kwargs: object) -> Any:
            raise NotAvailable(f"{name} is not available: the core schedules this model")

        return refuse

    kept = {"make_client", "make_async_mp_client", "get_kv_event_sources"}
    for name, member in vars(EngineCoreClient).items():
        ours = name in vars(EngineClient) or name in kept or name.startswith("_")
        if callable(member) and not ours:
            setattr(EngineClient, name, unavailable(name))


_name_what_is_missing()


class FrontLLM(AsyncLLM):  # type: ignore[misc]
    """vLLM's front half of one model. What it aborts itself was cancelled by its client."""

    engine_core: EngineClient

    def __init__(self, core: Core, model: FrontModel, config: VllmConfig) -> None:
        """Loads the tokenizer: takes a while, and may be done in another thread than the loop's."""
        making = _making.set(EngineClient(core, model, config.model_config))
        try:
            super().__init__(config, executor_class=None, log_stats=False, log_requests=False)
        finally:
            _making.reset(making)
        self.engine_core.processor = self.output_processor
        self._in_parts = model.task is Task.TRANSCRIPTION

    def _run_output_handler(self) -> None:
        """As vLLM's, but the task is ended when this object is collected. vLLM ends it, too, but
        it may be collected before that, and asyncio reports a task that is collected while it
        waits. The task has nothing of the call that comes first, which may hold this object."""
        if self.output_handler is None:  # asked by every request
            Context().run(super()._run_output_handler)
            ended = weakref.finalize(self, cancel_task_threadsafe, self.output_handler)
            ended.atexit = False

    async def generate(self, *args: Any, **settings: Any) -> AsyncIterator[Any]:
        """As vLLM's; of a long sound one part after another, so that it counts as one request of
        its client at a time."""
        made = super().generate(*args, **settings)
        if not self._in_parts:
            async for output in made:
                yield output
            return
        call = current.get()
        async with call.parts:
            if call.refusal is not None:  # of another part, without which there is no answer
                raise CoreRefusal(call.refusal)
            async for output in made:
                yield output

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        names = (request_id,) if isinstance(request_id, str) else as_list(request_id)
        ended = self.output_processor.abort_requests(names, internal)
        self.engine_core.abort(ended, FinishReason.CANCELLED)


_making: Final[ContextVar[EngineClient]] = ContextVar("making")


def replace_engine() -> None:
    """Have every `AsyncLLM` of this process take our client for its engine. Once."""
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: _making.get())


def _check_listed(call: Call, request: EngineCoreRequest, siblings: int) -> None:
    """Raise `TooManyListed` if the sequences of the call list too many tokens: those so far, or all
    of those that are asked for at once."""
    sampling = request.sampling_params
    if sampling is None:
        return
    listed = (
        len(sampling.stop_token_ids or ())
        + len(sampling.logit_bias or ())
        + len(sampling.allowed_token_ids or ())
        + sum(map(len, sampling.bad_words_token_ids or ()))
    )
    call.listed_tokens += listed
    if max(call.listed_tokens, listed * siblings) > MAX_LISTED_TOKENS:
        raise TooManyListed


def _media_tokens(request: EngineCoreRequest, task: Task) -> tuple[int, ...]:
    """Tokens of each image or sound in a prompt. What is made text of is in none."""
    features = () if task is Task.TRANSCRIPTION else request.mm_features or ()
    return tuple([int(feature.mm_position.get_num_embeds()) for feature in features])


def _check_media(request: EngineCoreRequest, siblings: int) -> None:
    """Raise `MediaTooLarge` for more prepared images or sounds than a request may have, or than all
    choices may have that are asked for at once: each has its own in the core."""
    of_sound = any(feature.modality == "audio" for feature in request.mm_features or ())
    word = "sounds" if of_sound else "images"
    items = (feature.data for feature in request.mm_features or ())
    size = sum(MultiModalCache.get_item_size(item) for item in items if item is not None)
    if size > MAX_REQUEST_BYTES - _OTHER_BYTES:
        smaller = (
            ", or smaller ones, or have max_pixels (or size.longest_edge, or max_patches where "
            "images are cut into tiles) lowered in the checkpoint's preprocessor_config.json"
        )
        raise MediaTooLarge(
            f"the {word} take {size} bytes when they are prepared for the model, of at most "
            f"{MAX_REQUEST_BYTES - _OTHER_BYTES} in a request: send fewer"
            + ("" if of_sound else smaller)
        )
    if size * siblings > MAX_TOGETHER_BYTES:
        raise MediaTooLarge(
            f"n: the {word} of all {siblings} choices take {size * siblings} bytes when they are "
            f"prepared for the model, of at most {MAX_TOGETHER_BYTES}: ask for fewer choices, or "
            f"send fewer {word}" + ("" if of_sound else ", or smaller ones"),
            "n",
        )


def _guide(sampling: SamplingParams | None) -> bytes:
    """The encoded guide of a request; empty if it has none. Raises `BadMessage`."""
    if sampling is None or sampling.structured_outputs is None:
        return b""
    return encode_guide(sampling.structured_outputs)


def _stop_tokens(sampling: SamplingParams) -> frozenset[int]:
    return frozenset(sampling.stop_token_ids or ()) - {sampling.eos_token_id}


def _end(request: RequestId, reason: EngineFinishReason) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=request, new_token_ids=[], finish_reason=reason)
