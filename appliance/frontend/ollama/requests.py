"""What clients may ask in Ollama's dialect, and the same as vLLM's requests.

As in Ollama, null is as good as nothing, and unknown fields and options are ignored. A strict
front end refuses them: fields in `appliance.frontend.fields`, options here. Options about how
Ollama loads a model mean nothing here and are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.renderers import TokenizeParams

from appliance.frontend.counts import MAX_STOPS, MAX_TEXTS
from appliance.frontend.ollama import templates
from appliance.frontend.ollama.errors import OllamaError
from appliance.service.front_frames import FrontModel

_Number: TypeAlias = Annotated[int, Meta(ge=-(2**31), lt=2**31)]

_DEFAULTS: Final = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""What Ollama takes when neither the client nor the model says anything."""

_HOTTEST: Final = 2.0
"""The highest temperature that vLLM draws with; a higher one is as good as this."""

_LEVELS: Final = ("low", "medium", "high", "max")

_DURATION: Final = re.compile(r"[-+]?(0|((\d+(\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h))+)", re.ASCII)
"""A duration as Go reads it: ``5m``, ``1h30m``, ``-1s``. Digits can be read in one way only: a
client may send megabytes of them."""

_IMAGES: Final = {"/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}
_SHOWN: Final = 64
"""So many characters of what a client sent are repeated in an error."""

_LOADING: Final = frozenset(
    {
        *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all"),
        *("vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep"),
        *("draft_num_predict", "typical_p", "tfs_z", "penalize_newline"),
        *("mirostat", "mirostat_tau", "mirostat_eta"),
    }
)
"""Options of Ollama's that change nothing here, as they change nothing in Ollama's own engine."""


class OllamaOptions(msgspec.Struct, kw_only=True):
    """How tokens are drawn."""

    temperature: float | None = None
    top_k: _Number | None = None
    """Not positive: no such limit."""
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    """-1: drawn at random."""
    num_predict: _Number | None = None
    """Not positive: until the context is full."""
    num_ctx: _Number | None = None
    """Prompts are cut to so many tokens, or to the model's context if that is smaller."""
    stop: list[str] | str | None = None
    repeat_penalty: float | None = None
    repeat_last_n: _Number | None = None
    """0: nothing is penalized. Otherwise penalties see the whole prompt and answer."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def fields(self, model_defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The same in vLLM's names. `model_defaults` come from the checkpoint, and go before
        Ollama's."""
        known = {name: one for name, one in model_defaults.items() if one is not None}
        drawn = self._drawn(_DEFAULTS | known)
        if self.repeat_last_n == 0:
            drawn["repetition_penalty"] = 1.0
        return drawn | self._bounds()

    def asked(self) -> dict[str, Any]:
        """Only what the client asks for, in the same names: the server of the model has defaults
        of its own."""
        found = self._drawn({}) | self._bounds()
        return {name: value for name, value in found.items() if value not in (None, [])}

    def _drawn(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """How tokens are drawn."""
        asked = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        if self.repeat_last_n == 0:
            asked = {name: one for name, one in asked.items() if not name.endswith("_penalty")}
        drawn = {
            name: found
            for name, value in asked.items()
            if (found := defaults.get(name) if value is None else value) is not None
        }
        if "temperature" in drawn:
            drawn["temperature"] = min(max(0.0, drawn["temperature"]), _HOTTEST)
        if "top_k" in drawn:
            drawn["top_k"] = max(0, drawn["top_k"])
        if "top_p" in drawn:
            if drawn["top_p"] <= 0:  # the likeliest token alone is as near to 0 as can be
                drawn |= {"top_p": 1.0, "top_k": 1}
            drawn["top_p"] = min(1.0, drawn["top_p"])
        return drawn

    def _bounds(self) -> dict[str, Any]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        limit = self.num_predict or 0
        return {
            "seed": None if self.seed == -1 else self.seed,
            "max_tokens": limit if limit > 0 else None,
            "stop": [stop for stop in stops if stop],
        }


class _Body(msgspec.Struct, kw_only=True):
    """Fields that all endpoints share."""

    model: str | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None
    """A wish without effect: models share a pool, and leave it when others need room."""

    def check(self) -> None:
        """Raise `OllamaError` for what no model could do."""
        if isinstance(self.keep_alive, str) and not _DURATION.fullmatch(self.keep_alive):
            shown = self.keep_alive[:_SHOWN]
            raise OllamaError(400, f'keep_alive: {shown!r} is no duration, such as "5m"')


class _Generating(_Body, kw_only=True):
    """Fields of both endpoints that generate text."""

    stream: bool | None = None
    """Unless it is false, the answer is streamed."""
    format: str | dict[str, Any] | None = None
    """``json``, or a schema."""
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    """Unless it is false, a prompt that is too long is cut."""
    shift: bool | None = None
    """Without effect: an answer ends when the context is full."""

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def truncates(self) -> bool:
        return self.truncate is not False

    @property
    def unloads(self) -> bool:
        """Whether the model shall not stay loaded."""
        if isinstance(self.keep_alive, str):
            return not any(digit in self.keep_alive for digit in "123456789")
        return self.keep_alive == 0

    def check(self) -> None:
        super().check()
        if isinstance(self.format, str) and self.format not in ("", "json"):
            shown = self.format[:_SHOWN]
            raise OllamaError(400, f'format: {shown!r} is neither "json" nor a JSON schema')
        if isinstance(self.think, str) and self.think not in _LEVELS:
            levels, shown = ", ".join(_LEVELS), self.think[:_SHOWN]
            raise OllamaError(400, f"think: {shown!r} is none of {levels}, true and false")
        stops = None if self.options is None else self.options.stop
        if isinstance(stops, list) and len(stops) > MAX_STOPS:
            raise OllamaError(400, f"stop: at most {MAX_STOPS} texts, this has {len(stops)}")

    def _common(self, model_defaults: Mapping[str, Any]) -> dict[str, Any]:
        options = self.options or OllamaOptions()
        return {
            "stream": self.streams,
            "stream_options": {"include_usage": True} if self.streams else None,
            "response_format": self.response_format,
            "num_ctx": options.num_ctx,
            **options.fields(model_defaults),
        }

    def _chat(self, model_defaults: Mapping[str, Any]) -> dict[str, Any]:
        return self._common(model_defaults) | {
            "chat_template_kwargs": self._template_variables(),
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
            "logprobs": bool(self.logprobs),
            "top_logprobs": self.top_logprobs or 0,
        }

    def _template_variables(self) -> dict[str, Any] | None:
        """Families of models have two names for it; templates ignore what they do not know."""
        wanted = None if self.think is None else bool(self.think)
        return None if wanted is None else {"enable_thinking": wanted, "thinking": wanted}

    @property
    def response_format(self) -> dict[str, Any] | None:
        """`format` in OpenAI's words."""
        match self.format:
            case None | "":
                return None
            case "json":
                return {"type": "json_object"}
            case schema:
                return {"type": "json_schema", "json_schema": {"name": "format", "schema": schema}}


class CalledFunction(msgspec.Struct, kw_only=True):
    """What a model called."""

    name: str
    arguments: dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model made earlier in the conversation."""

    function: CalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One message of a chat."""

    role: str
    content: str | None = None
    images: list[str] | None = None
    """In base64."""
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatBody(_Generating, kw_only=True):
    """``POST /api/chat``."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def loads(self) -> bool:
        """Whether the client only wants the model to be loaded."""
        return not self.messages

    @property
    def sees(self) -> bool:
        """Whether it sends images."""
        return any(message.images for message in self.messages or ())

    def request(self, model: FrontModel, defaults: Mapping[str, Any]) -> FittedChat:
        """The same for vLLM. Raises `OllamaError`."""
        check_thinks(self, model)
        if self.tools and model.tool_parser is None:
            raise cannot(model, "tools")
        messages = self.messages or []
        for i, message in enumerate(messages):
            if message.images and not model.images:
                raise cannot(model, f"vision: messages[{i}].images")
        return FittedChat(
            model=model.name,
            messages=openai_messages(messages),
            # vLLM takes no empty list, and chooses "auto" when nothing is said.
            **({"tools": self.tools} if self.tools else {}),
            **self._chat(defaults),
        )


class GenerateBody(_Generating, kw_only=True):
    """``POST /api/generate``."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[Annotated[int, Meta(ge=0, lt=2**31)]] | None = None
    """What an earlier answer gave: the tokens of the conversation before this prompt."""
    images: list[str] | None = None
    """In base64."""

    @property
    def loads(self) -> bool:
        """Whether the client only wants the model to be loaded."""
        return not (self.prompt or self.images)

    @property
    def sees(self) -> bool:
        """Whether it sends images."""
        return bool(self.images)

    def check(self) -> None:
        super().check()
        if self.raw and (self.template or self.system or self.context):
            raise OllamaError(400, "raw mode does not support template, system, or context")

    def check_places(self) -> None:
        """Raise `OllamaError` unless its images have a place in the prompt."""
        if not self.images:
            return
        for name in ("raw", "suffix", "template", "context"):
            if getattr(self, name):
                raise OllamaError(400, f"images: they have no place next to {name}: remove it")

    def request(
        self, model: FrontModel, defaults: Mapping[str, Any]
    ) -> FittedChat | FittedCompletion:
        """The same for vLLM: a chat of one message, or a plain completion of what no chat template
        is for. Raises `OllamaError`."""
        check_thinks(self, model)
        if self.images and not model.images:
            raise cannot(model, "vision: images")
        self.check_places()
        prompt = self.prompt or ""
        if self.raw or self.suffix or self.template:
            if self.template and not self.suffix:
                values = {"System": self.system or "", "Prompt": prompt, "Suffix": ""}
                prompt = templates.render(self.template, values)
            common = self._common(defaults)
            common["max_tokens"] = common["max_tokens"] or model.max_context  # vLLM's null means 16
            return FittedCompletion(
                model=model.name,
                prompt=prompt,
                suffix=self.suffix or None,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                return_token_ids=not self.raw,
                **common,
                # Fill-in-the-middle prompts lose their meaning when they are cut.
                **({"truncate_prompt_tokens": -1} if self.truncates and not self.suffix else {}),
                truncation_side="left",
            )
        system = [OllamaMessage(role="system", content=self.system)] if self.system else []
        asked = OllamaMessage(role="user", content=prompt, images=self.images)
        return FittedChat(
            model=model.name,
            messages=openai_messages([*system, asked]),
            return_token_ids=True,
            **self._chat(defaults),
        )


class EmbedBody(_Body, kw_only=True):
    """``POST /api/embed``."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0)] | None = None

    def check(self) -> None:
        super().check()
        if (count := len(self.texts)) > MAX_TEXTS:
            raise OllamaError(400, f"input: at most {MAX_TEXTS} texts, this has {count}")

    @property
    def texts(self) -> list[str]:
        """None of them, if the model is only to be loaded."""
        return (
            ([self.input] if self.input else [])
            if isinstance(self.input, str)
            else (self.input or [])
        )

    def request(self, model: FrontModel) -> EmbeddingCompletionRequest:
        """The same for vLLM. Ollama's vectors have length 1, whatever the model has."""
        return EmbeddingCompletionRequest(
            model=model.name,
            input=self.texts,
            dimensions=self.dimensions or None,
            use_activation=True,
            truncate_prompt_tokens=None if self.truncate is False else -1,
            truncation_side="right",
        )


class EmbeddingsBody(_Body, kw_only=True):
    """``POST /api/embeddings``, which is older: one text, and the vector as the model has it."""

    prompt: str | None = None

    def request(self, model: FrontModel) -> EmbeddingCompletionRequest:
        return EmbeddingCompletionRequest(
            model=model.name,
            input=[self.prompt or ""],
            truncate_prompt_tokens=-1,
            truncation_side="right",
        )


class FittedChat(ChatCompletionRequest):  # type: ignore[misc]
    """A chat whose prompt has to fit into a context of the client's choice, where `max_tokens` is
    a bound and asks for no room."""

    field_names: ClassVar[set[str] | None] = None
    num_ctx: int | None = None

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return _fitting(self, model_config)


class FittedCompletion(CompletionRequest):  # type: ignore[misc]
    """As `FittedChat`, of a prompt that is sent as it is."""

    field_names: ClassVar[set[str] | None] = None
    num_ctx: int | None = None

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return _fitting(self, model_config)


def most_prompt_tokens(request: FittedChat | FittedCompletion, model_config: ModelConfig) -> int:
    """How long its prompt may be: room for one token of the answer is left."""
    context: int = model_config.max_model_len
    if request.num_ctx is not None and request.num_ctx > 0:
        context = min(context, request.num_ctx)
    return max(1, context - 1)


def _fitting(request: FittedChat | FittedCompletion, model_config: ModelConfig) -> TokenizeParams:
    return TokenizeParams(
        max_total_tokens=most_prompt_tokens(request, model_config),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        add_special_tokens=request.add_special_tokens,
    )


_AnyBody = TypeVar("_AnyBody", bound=_Body)


def decoded(body: bytes, kind: type[_AnyBody], *, strict: bool) -> _AnyBody:
    """What `body` says. `strict` refuses options that Ollama does not know; the front end has
    checked the fields before. Raises `OllamaError`."""
    try:
        asked = msgspec.json.decode(body, type=kind)
        if strict:
            _refuse_unknown_options(body)
    except msgspec.ValidationError as error:
        raise OllamaError(400, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OllamaError(400, f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise OllamaError(400, "the body is nested too deeply") from error
    asked.check()
    return asked


def _refuse_unknown_options(body: bytes) -> None:
    options = msgspec.json.decode(body, type=_Optioned).options or {}
    known = {*OllamaOptions.__struct_fields__, *_LOADING}
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        raise OllamaError(
            400, f"options.{unknown}: unknown option, and api.strict is set: remove it"
        )


class _Optioned(msgspec.Struct):
    options: dict[str, msgspec.Raw] | None = None


def cannot(model: FrontModel, what: str) -> OllamaError:
    """A capability that the model has not. Clients match the words."""
    last = model.name.rpartition("/")[2]
    name = model.name if ":" in last else f"{model.name}:latest"
    return OllamaError(400, f"registry.ollama.ai/library/{name} does not support {what}")


def check_thinks(asked: _Generating, model: FrontModel) -> None:
    """Raise `OllamaError` if thoughts are wanted of a model that has none."""
    if asked.think and model.reasoning_parser is None:
        raise OllamaError(400, f'"{asked.model}" does not support thinking')


def openai_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """The same in OpenAI's words. Calls without ids get some, and results the id of the oldest
    call of their tool, or of any, that has none yet."""
    translated: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        role = message.role.lower()
        calls = [_call(f"call_{i}_{j}", call) for j, call in enumerate(message.tool_calls or ())]
        waiting += calls
        chat: dict[str, Any] = {"role": role, "content": _content(message)}
        if message.thinking:
            chat["reasoning"] = message.thinking
        if calls:
            chat["tool_calls"] = calls
        if role == "tool":
            answered = _answered(message, waiting)
            chat |= {} if answered is None else {"tool_call_id": answered}
            chat |= {"name": message.tool_name} if message.tool_name else {}
        translated.append(chat)
    return translated


def _content(message: OllamaMessage) -> str | list[dict[str, Any]]:
    """Images come first, as Ollama has them."""
    text = message.content or ""
    if not message.images:
        return text
    urls = (f"data:image/{_image_type(image)};base64,{image}" for image in message.images)
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _image_type(image: str) -> str:
    """Of a file in base64, by how it begins; other servers go by it."""
    return next((kind for start, kind in _IMAGES.items() if image.startswith(start)), "png")


def _call(name: str, call: ToolCall) -> dict[str, Any]:
    """`name` is its id, unless it has one."""
    arguments = msgspec.json.encode(call.function.arguments or {}).decode()
    return {
        "id": call.id or name,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def _answered(result: OllamaMessage, waiting: list[dict[str, Any]]) -> str | None:
    """The id of the call that a result belongs to, which waits no longer."""
    if result.tool_call_id:
        waiting[:] = [call for call in waiting if call["id"] != result.tool_call_id]
        return result.tool_call_id
    named = [call for call in waiting if call["function"]["name"] == result.tool_name]
    call = next(iter(named or waiting), None)
    if call is None:
        return None
    waiting.remove(call)
    return str(call["id"])
