"""vLLM's answers as Ollama's: one JSON object, or one a line."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from appliance.frontend.ollama.errors import OllamaError

Endpoint: TypeAlias = Literal["chat", "generate"]

# --- what vLLM says: a whole answer, or one event of a stream -------------------------------------


class _FunctionPart(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPart(msgspec.Struct):
    """A call, or more of the call of this index."""

    index: int | None = None
    id: str | None = None
    function: _FunctionPart = msgspec.field(default_factory=_FunctionPart)


class _Part(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_CallPart] | None = None


class _SaidToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[_SaidToken] = []


class _SaidLogprobs(msgspec.Struct):
    """Of a chat, `content`; of a completion the others."""

    content: list[_SaidToken] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(msgspec.Struct):
    message: _Part | None = None
    delta: _Part | None = None
    text: str | None = None
    logprobs: _SaidLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def part(self) -> _Part:
        return self.delta or self.message or _Part(content=self.text)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Error(msgspec.Struct):
    message: str
    code: int = 500


class Said(msgspec.Struct):
    """An answer of vLLM's, or a part of it."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: _Error | None = None


_said: Final = msgspec.json.Decoder(Said)
_EVENT: Final = "data: "


async def events(stream: AsyncIterator[str]) -> AsyncIterator[Said]:
    """What a stream of server-sent events holds. Raises `OllamaError` for an error in it."""
    async for event in stream:
        if event.startswith(_EVENT + "{"):
            yield understood(event[len(_EVENT) :])


def understood(text: str | bytes) -> Said:
    """vLLM's JSON. Raises `OllamaError` if it tells of an error."""
    said = _said.decode(text)
    if said.error is not None:
        raise OllamaError(said.error.code, said.error.message)
    return said


# --- what Ollama says ----------------------------------------------------------------------------


class _TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class _Logprob(_TokenLogprob, kw_only=True):
    top_logprobs: list[_TokenLogprob] | UnsetType = UNSET


class _Function(msgspec.Struct, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class _ToolCall(msgspec.Struct, kw_only=True):
    id: str
    function: _Function


class _Message(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[_ToolCall] | UnsetType = UNSET


class _Answer(msgspec.Struct, kw_only=True):
    """A line, or the whole answer. Durations are nanoseconds."""

    model: str
    created_at: str
    message: _Message | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[_Logprob] | UnsetType = UNSET


class Reply:
    """One answer, whole or line by line.

    `started` is when the request came, on the monotonic clock, in seconds. `timing` gives the
    core's account of the request once it is over: the value of a ``Server-Timing`` header.
    """

    def __init__(
        self,
        model: str,
        endpoint: Endpoint,
        started: float,
        timing: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._model = model
        self._chats = endpoint == "chat"
        self._started = started
        self._submitted = time.monotonic()
        self._first: float | None = None
        self._timing = timing
        self._finish: str | None = None
        self._usage = _Usage()
        self._tokens: list[int] = []
        """Of the prompt and the answer, where they were asked for."""
        self._open: _CallPart | None = None
        """The call that the model is writing: clients get it when it is whole."""

    def line(self, said: Said) -> bytes:
        """A line of the stream, b"" if there is nothing to tell. Raises `OllamaError`."""
        answer = self._answer()
        found = self._tell(answer, said)
        return msgspec.json.encode(answer) + b"\n" if found else b""

    def last(self) -> bytes:
        """The last line: no text, and the metrics."""
        answer = self._answer()
        self._finished(answer)
        return msgspec.json.encode(answer) + b"\n"

    def whole(self, said: Said) -> bytes:
        """The answer that is not streamed. Raises `OllamaError`."""
        answer = self._answer()
        self._tell(answer, said)
        self._finished(answer)
        return msgspec.json.encode(answer)

    def placed(self, reason: Literal["load", "unload"]) -> bytes:
        """The answer to a request without a prompt, which only concerns where the model is."""
        answer = self._answer()
        answer.done, answer.done_reason = True, reason
        return msgspec.json.encode(answer)

    def _answer(self) -> _Answer:
        answer = _Answer(model=self._model, created_at=timestamp(datetime.now(UTC)))
        if self._chats:
            answer.message = _Message()
        else:
            answer.response = ""
        return answer

    def _tell(self, answer: _Answer, said: Said) -> bool:
        """Put into `answer` what was said; whether that is anything to tell."""
        self._usage = said.usage or self._usage
        self._tokens += said.prompt_token_ids or ()
        if not said.choices:
            return False
        choice = said.choices[0]
        self._tokens += choice.prompt_token_ids or ()
        self._tokens += choice.token_ids or ()
        self._finish = choice.finish_reason or self._finish
        part = choice.part
        text, thinking = part.content or "", part.reasoning or UNSET
        calls = _calls(self._whole_calls(part.tool_calls or ()), cut=self._finish == "length")
        if answer.message is not UNSET:
            answer.message.content = text
            answer.message.thinking = thinking
            answer.message.tool_calls = calls or UNSET
        else:
            answer.response = text
            answer.thinking = thinking
        answer.logprobs = _logprobs(choice.logprobs) or UNSET
        found = bool(text or thinking or calls or answer.logprobs)
        if found and self._first is None:
            self._first = time.monotonic()
        return found

    def _whole_calls(self, parts: Sequence[_CallPart]) -> list[_CallPart]:
        """Calls of which nothing more will come."""
        whole: list[_CallPart] = []
        for part in parts:
            if self._open is not None and part.index is not None and part.index == self._open.index:
                now, more = self._open.function, part.function
                now.name = now.name or more.name
                now.arguments = (now.arguments or "") + (more.arguments or "")
                continue
            if self._open is not None:
                whole.append(self._open)
            self._open = part
        if self._finish is not None and self._open is not None:
            whole.append(self._open)
            self._open = None
        return whole

    def _finished(self, answer: _Answer) -> None:
        now = time.monotonic()
        answer.done = True
        answer.done_reason = "length" if self._finish == "length" else "stop"
        answer.prompt_eval_count = self._usage.prompt_tokens
        answer.eval_count = self._usage.completion_tokens or 0
        if self._tokens and not self._chats:
            answer.context = self._tokens
        if phases := _phases(self._timing()):
            loading = self._submitted - self._started + phases["queue"] + phases["load"]
            reading = phases["prefill"]
            writing = phases["decode"] + phases["preempted"]
        else:
            # An answer that came at once does not tell how long its prompt took.
            first = self._submitted if self._first in (None, now) else self._first
            loading = self._submitted - self._started
            reading, writing = (first or now) - self._submitted, now - (first or now)
        answer.load_duration = _nanoseconds(loading)
        answer.prompt_eval_duration = _nanoseconds(reading)
        answer.eval_duration = _nanoseconds(writing)
        answer.total_duration = (
            answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
        )


def _phases(timing: str | None) -> dict[str, float]:
    """Seconds by phase of a ``Server-Timing``; empty if there is none."""
    if not timing:
        return {}
    phases = dict.fromkeys(("queue", "load", "prefill", "decode", "preempted"), 0.0)
    for metric in timing.split(","):
        name, *parameters = (word.strip() for word in metric.split(";"))
        for parameter in parameters:
            if parameter.startswith("dur="):
                phases[name] = float(parameter.removeprefix("dur=")) / 1000
    return phases


def _calls(calls: Sequence[_CallPart], *, cut: bool) -> list[_ToolCall]:
    """Calls in Ollama's words: arguments are objects. Those that the end of the context `cut` off
    are none. Raises `OllamaError` for other arguments that are no object."""
    found = []
    for i, call in enumerate(calls):
        arguments = _object(call.function.arguments or "{}")
        if arguments is None:
            if cut:
                continue
            raise OllamaError(500, "the model called a tool without JSON for its arguments")
        index = i if call.index is None else call.index
        function = _Function(index=index, name=call.function.name or "", arguments=arguments)
        found.append(_ToolCall(id=call.id or "", function=function))
    return found


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _logprobs(said: _SaidLogprobs | None) -> list[_Logprob]:
    if said is None:
        return []
    if said.content is not None:
        return [
            _Logprob(
                token=token.token,
                logprob=token.logprob,
                bytes=token.bytes or list(token.token.encode()),
                top_logprobs=[
                    _TokenLogprob(
                        token=top.token,
                        logprob=top.logprob,
                        bytes=top.bytes or list(top.token.encode()),
                    )
                    for top in token.top_logprobs
                ]
                or UNSET,
            )
            for token in said.content
        ]
    tops = said.top_logprobs or [None] * len(said.tokens)
    return [
        _Logprob(
            token=token,
            logprob=logprob or 0.0,
            bytes=list(token.encode()),
            top_logprobs=[
                _TokenLogprob(token=text, logprob=value, bytes=list(text.encode()))
                for text, value in (top or {}).items()
            ]
            or UNSET,
        )
        for token, logprob, top in zip(said.tokens, said.token_logprobs, tops, strict=True)
    ]


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC, as Ollama writes it."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
