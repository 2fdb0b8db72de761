"""What a server with OpenAI's API answers, as vLLM would say it: other servers leave fields out, or
have other names for some.

Sans-IO. The translations into other dialects read vLLM's answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from appliance.frontend.remote.bodies import BYTES_OF_TOKEN

MOST_CALLED_BYTES: Final = 4 << 20
"""Of a stream, from the first call of a tool on: dialects keep calls until they are whole."""
_ENDS: Final = frozenset({"stop", "length", "tool_calls", "content_filter"})
"""Why an answer ended, as dialects know it. Other reasons are names for the first one, such as
`eos_token`, but for `function_call`: that is what calls of tools were called before."""
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"


class BadAnswer(Exception):
    """An answer that cannot be translated; the message says why, and quotes nothing of it."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Part(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """What others call `reasoning`."""
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Part | None = None
    delta: _Part | None = None
    text: str | None = None
    """Of a completion, and in chats of some servers: it is read as `content`."""
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    def said(self) -> dict[str, Any]:
        given, made = self.prompt_tokens or 0, self.completion_tokens or 0
        usage: dict[str, Any] = {"prompt_tokens": given, "completion_tokens": made}
        usage["total_tokens"] = given + made
        details = self.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": details.cached_tokens}
        return usage


class _Answer(msgspec.Struct):
    id: str | None = None
    model: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


def whole(body: bytes, prompt_tokens: int, *, logprobs: bool = False) -> dict[str, Any]:
    """An answer in one piece, whose prompt has about so many tokens; `logprobs` says that they were
    asked for: some servers always have them. Raises `BadAnswer`."""
    answer = _read(body)
    if not answer.choices:
        raise BadAnswer("it has no choices")
    choice = answer.choices[0]
    part = choice.message or _Part(content=choice.text)
    calls = [
        _said_call(call, f"call_{number}") for number, call in enumerate(part.tool_calls or ())
    ]  # fmt: skip
    message = {"role": "assistant", **_texts(part), "tool_calls": calls}
    ended = _reason(choice.finish_reason)
    said = {"index": 0, "message": message, "finish_reason": ended}
    said["stop_reason"] = choice.stop_reason
    said["logprobs"] = choice.logprobs if logprobs else None
    usage = answer.usage or _Usage(prompt_tokens, len(body) // BYTES_OF_TOKEN)
    return {"id": answer.id or "", "model": answer.model, "choices": [said], "usage": usage.said()}


@dataclass
class _Begun:
    """A call of a tool, as far as it has come."""

    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)


class Chunks:
    """The events of a stream: the first one has no text, and the last one before the end has the
    usage and nothing else.

    Servers may write several calls of tools in turns, and dialects know one call after another. So
    the first call goes on as it comes, and the others come whole at the end.
    """

    def __init__(self, prompt_tokens: int, *, logprobs: bool = False) -> None:
        self._usage: _Usage | None = None
        self._prompt_tokens = prompt_tokens
        self._logprobs = logprobs
        self._pieces = 0
        self._begun = False
        self._name = ("", "")
        self._calls: dict[int, _Begun] = {}
        self._streamed: int | None = None
        """The number of the call that goes on as it comes."""
        self._called_bytes = 0
        self._ended: dict[str, Any] = {}
        """Why, if the server has said it: calls may come after that."""

    def feed(self, data: bytes) -> Iterator[str]:
        """What to read for some whole events. Raises `BadAnswer`."""
        for event in data.split(b"\n\n"):
            if not event.startswith(_DATA):
                continue
            said = event.removeprefix(_DATA)
            if said.strip() == _DONE:
                if self._calls or self._ended:
                    yield from self._chunk([self._end()], None)
                usage = self._usage or _Usage(self._prompt_tokens, self._pieces)
                yield from self._chunk([], usage.said())
                yield "data: [DONE]\n\n"
                return
            yield from self._event(_read(said))
            self._called_bytes += len(said) if self._calls else 0
            if self._called_bytes > MOST_CALLED_BYTES:
                raise BadAnswer(
                    f"with its calls of tools it has more than {MOST_CALLED_BYTES} bytes"
                )

    def _event(self, answer: _Answer) -> Iterator[str]:
        if answer.error is not None:
            yield _event({"error": {"message": error_message(answer.error), "code": 500}})
            return
        self._usage = answer.usage or self._usage
        self._name = (answer.id or self._name[0], answer.model or self._name[1])
        for choice in answer.choices:
            if choice.index == 0:
                self._pieces += 1
                yield from self._chunk([self._choice(choice)], None)

    def _choice(self, choice: _Choice) -> dict[str, Any]:
        if choice.finish_reason:
            self._ended["finish_reason"] = _reason(choice.finish_reason)
            self._ended["stop_reason"] = choice.stop_reason
        part = choice.delta or choice.message or _Part(content=choice.text)
        calls = [said for call in part.tool_calls or () for said in self._call(call)]
        delta = {**_texts(part), **({"tool_calls": calls} if calls else {})}
        logprobs = choice.logprobs if self._logprobs else None
        return {"index": 0, "delta": delta, "logprobs": logprobs}

    def _call(self, call: _Call) -> Iterator[dict[str, Any]]:
        """Keep a part of a call; give it if it is one of the call that goes on as it comes. The
        first part of that has an id and a name."""
        number = call.index
        if number is None:
            last = next(reversed(self._calls), -1)
            number = max(self._calls, default=-1) + 1 if call.function.name else max(last, 0)
        known = self._calls.setdefault(number, _Begun())
        arguments = _arguments(call.function.arguments)
        if self._streamed == number:
            yield {"index": number, "function": {"arguments": arguments}}
            return
        known.id = known.id or call.id
        known.name = known.name or call.function.name
        known.arguments.append(arguments)
        if self._streamed is None and known.name:
            self._streamed = number
            yield _begun(number, known)
            known.arguments.clear()

    def _end(self) -> dict[str, Any]:
        """The choice with the calls that were kept, and why the answer ended."""
        kept = sorted(self._calls.items())
        calls = [_begun(number, call) for number, call in kept if number != self._streamed]
        delta = {"tool_calls": calls} if calls else {}
        return {"index": 0, "delta": delta, "finish_reason": "stop", **self._ended}

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> Iterator[str]:
        name, model = self._name
        head = {"id": name, "object": "chat.completion.chunk", "created": 0, "model": model}
        if not self._begun:
            self._begun = True
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            yield _event({**head, "choices": [first]})
        yield _event({**head, "choices": choices, "usage": usage})


def error_message(error: object) -> str:
    """What a server says of its error."""
    if isinstance(error, dict):
        error = error.get("message")
    return error if isinstance(error, str) and error else "the server says that it failed"


def refusal_message(body: bytes) -> str:
    """What a server says of a request that it refuses."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = None
    found = fields if isinstance(fields, dict) else {}
    said = next((found[name] for name in ("error", "message", "detail") if found.get(name)), None)
    if isinstance(said, dict):
        said = said.get("message")
    return said if isinstance(said, str) and said else "the server refuses the request"


def _read(data: bytes) -> _Answer:
    try:
        return msgspec.json.decode(data, type=_Answer)
    except msgspec.ValidationError as error:
        raise BadAnswer("a field of it is not as OpenAI's API has it") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer("it is not JSON") from error


def _reason(said: str | None) -> str:
    if said in _ENDS:
        return said
    return "tool_calls" if said == "function_call" else "stop"


def _texts(part: _Part) -> dict[str, Any]:
    texts = {
        "content": part.refusal if part.content is None else part.content,
        "reasoning": part.reasoning or part.reasoning_content,
    }
    return {name: text for name, text in texts.items() if text is not None}


def _said_call(call: _Call, name: str) -> dict[str, Any]:
    function = {
        "name": call.function.name or "",
        "arguments": _arguments(call.function.arguments),
    }
    return {"id": call.id or name, "type": "function", "function": function}


def _begun(number: int, call: _Begun) -> dict[str, Any]:
    function = {"name": call.name or "", "arguments": "".join(call.arguments)}
    head = {"id": call.id or f"call_{number}", "type": "function", "index": number}
    return {**head, "function": function}


def _arguments(given: str | dict[str, Any] | None) -> str:
    """Some servers write an object where OpenAI's has the text of one."""
    return msgspec.json.encode(given).decode() if isinstance(given, dict) else given or ""


def _event(value: object) -> str:
    return f"data: {msgspec.json.encode(value).decode()}\n\n"
