"""A front end without vLLM, in the test's own process: a session of the core, fed with frames.

It computes: it submits requests, and answers lines of batches and, as an ASGI application, clients.
`front_end_double` is the other half: processes that are handed connections, and compute nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from typing import Any, TypeVar

from appliance import framing
from appliance.gateway.sessions import Sessions
from appliance.http.error_formats import shape_of
from appliance.http.errors import ApiError
from appliance.service.front_frames import (
    DECIDING_HEADERS,
    VERSION,
    Abort,
    Admitted,
    Down,
    Enter,
    Entered,
    Hello,
    Leave,
    Outputs,
    Ran,
    Ready,
    Refused,
    Run,
    StopRun,
    Submit,
    Up,
    decoder_for_core,
    decoder_for_front,
)
from appliance.service.front_paths import is_front_path
from appliance.vocabulary import FinishReason, RequestId
from tests.unit.doubles.fake_service import decode, encode

D = TypeVar("D")


class FrontDouble:
    """Greets at once. What it is sent is in `sent`; requests are shown in `tokens`, `details`,
    `ends` and `refused` by their ids. It answers lines of batches as a chat would be."""

    def __init__(self, sessions: Sessions) -> None:
        self.sent: list[Down] = []
        self.tokens: dict[RequestId, list[int]] = {}
        self.details: dict[RequestId, list[bytes]] = {}
        self.ends: dict[RequestId, FinishReason] = {}
        self.timings: dict[RequestId, str | None] = {}
        self.refused: dict[RequestId, Refused] = {}
        self.answers_lines = True
        self.died = False
        self._lines: dict[int, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._calls = itertools.count(1)
        self._to_core, self._to_front = decoder_for_core(), decoder_for_front()
        self.session = sessions.open(self._take, self.operators.__contains__)
        self.say(Hello(version=VERSION, pid=os.getpid()))
        self.say(Ready())

    operators: frozenset[int] = frozenset({7})
    """Its connections that have an operator at the other end."""

    # --- what it says ----------------------------------------------------------------------------

    def say(self, frame: Up) -> None:
        """Over the wire, and so through its encoding."""
        for heard in self._to_core.feed(framing.encode(frame)):
            self.session.received(heard)

    def enter(
        self,
        *,
        path: str = "/v1/chat/completions",
        method: str = "POST",
        client: str | None = "127.0.0.1",
        connection: int = 0,
        **headers: str,
    ) -> Entered | Refused:
        """Begin a call; what the core answers. Underscores in headers' names are dashes."""
        call = next(self._calls)
        told = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        self.say(
            Enter(
                call=call,
                method=method,
                path=path,
                client=client,
                headers=told,
                connection=connection,
            )
        )
        answer = self.sent[-1]
        assert isinstance(answer, Entered | Refused)
        assert answer.call == call
        return answer

    def call(self, secret: str | None = None, **headers: str) -> int:
        """Begin a call that is let in; its number."""
        if secret is not None:
            headers["authorization"] = f"Bearer {secret}"
        entered = self.enter(**headers)
        assert isinstance(entered, Entered), entered
        return entered.call

    def submit(self, call: int, name: RequestId, prompt: str = "hello", **fields: Any) -> None:
        given: dict[str, Any] = {"model": "small", "max_tokens": 8, "body": b""}
        self.say(Submit(call=call, request=name, prompt=tuple(encode(prompt)), **given | fields))

    def leave(self, call: int) -> None:
        self.say(Leave(call))

    def abort(self, *names: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.say(Abort(list(names), reason))

    def die(self) -> None:
        self.died = True
        for line in self._lines.values():
            line.cancel()
        self.session.lost()

    # --- what it hears ---------------------------------------------------------------------------

    def heard(self, kind: type[D]) -> list[D]:
        return [frame for frame in self.sent if isinstance(frame, kind)]

    def text(self, name: RequestId) -> str:
        return decode(self.tokens.get(name, ()))

    def admitted(self, name: RequestId) -> bool:
        return Admitted(name) in self.sent

    async def until_over(self, *names: RequestId) -> None:
        """Returns when all these requests have ended, or were refused."""
        while not all(name in self.ends or name in self.refused for name in names):
            self._news.clear()
            await self._news.wait()

    def _take(self, frame: Down) -> None:
        assert not self.died, "a frame for a front end that is gone"
        for heard in self._to_front.feed(framing.encode(frame)):
            self.sent.append(heard)
            match heard:
                case Outputs():
                    self._note(heard)
                case Refused(request=str(request)):
                    self.refused[request] = heard
                case Run() if self.answers_lines:
                    self._lines[heard.call] = asyncio.ensure_future(self._answer(heard))
                case StopRun():
                    self._lines.pop(heard.call).cancel()
            self._news.set()

    def _note(self, frame: Outputs) -> None:
        for output in frame.outputs:
            assert output.request not in self.ends, "output behind the end"
            assert not (output.tokens and output.details)
            self.tokens.setdefault(output.request, []).extend(output.tokens)
            self.details.setdefault(output.request, []).extend(output.details)
            if output.finished is not None:
                self.ends[output.request] = output.finished
                self.timings[output.request] = output.timing

    # --- lines of batches ------------------------------------------------------------------------

    async def _answer(self, line: Run) -> None:
        try:
            status, body = await self.compute(line.call, line.path, json.loads(line.body))
        finally:
            self._lines.pop(line.call, None)
        self._ran(line, status, body)

    async def compute(self, call: int, path: str, body: dict[str, Any]) -> tuple[int, object]:
        """Status and body of the answer to a request of a call."""
        messages = path == "/v1/messages"
        bad = "stream" if body.get("stream") else None
        bad = "temperature" if body.get("temperature", 1.0) > 2.0 else bad
        if bad is not None:
            return 400, _error(messages, {"message": f"{bad}: wrong", "param": bad, "code": 400})
        pooled = path == "/v1/embeddings"
        texts = body["input"] if pooled else [_rendered(body)] * body.get("n", 1)
        most = 0 if pooled else body.get("max_tokens", 8)
        names = [f"line{call}-{number}" for number in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            self.submit(call, name, text, model=body["model"], max_tokens=most)
        while not all(name in self.ends for name in names):
            refused = next((self.refused[n] for n in names if n in self.refused), None)
            if refused is not None:
                self.abort(*names)
                error = {"message": refused.message, "code": refused.code, "type": "error"}
                return refused.status, _error(messages, error)
            self._news.clear()
            await self._news.wait()
        outputs = [self.text(name) for name in names]
        thoughts = sum(len(text.partition("(")[2].partition(")")[0]) for text in outputs)
        prompt, said = len(encode(texts[0])), sum(len(encode(text)) for text in outputs)
        usage = {
            "prompt_tokens": sum(map(len, texts)) if pooled else prompt,
            "completion_tokens": said,
            "total_tokens": prompt + said,
            "completion_tokens_details": {"reasoning_tokens": thoughts},
        }
        if messages:
            content = [{"type": "text", "text": outputs[0]}]
            counts = {"input_tokens": prompt, "output_tokens": said}
            about = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"]}
            ended = {"stop_reason": "end_turn", "stop_sequence": None}
            return 200, about | ended | {"content": content, "usage": counts}
        said_by = [
            {"index": index, "message": {"role": "assistant", "content": text}}
            for index, text in enumerate(outputs)
        ]
        return 200, {"usage": usage, "data" if pooled else "choices": said_by}

    def _ran(self, line: Run, status: int, body: object) -> None:
        self._lines.pop(line.call, None)
        self.say(Ran(call=line.call, status=status, body=_json(body)))


class Fronted:
    """An ASGI application with a front end: the core's own answers, and what the double computes,
    with the headers of the core."""

    def __init__(self, core: Any, front: FrontDouble) -> None:
        self._core = core
        self._front = front

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not is_front_path(scope["path"]):
            await self._core(scope, receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message.get("more_body"):
                break
        status, headers, answer = await self._answered(scope, body)
        told = [(name.encode(), value.encode()) for name, value in headers]
        await send({"type": "http.response.start", "status": status, "headers": told})
        await send({"type": "http.response.body", "body": answer})

    async def _answered(self, scope: Any, body: bytes) -> tuple[int, Any, bytes]:
        sent = {name.decode(): value.decode() for name, value in scope["headers"]}
        deciding = {name: value for name, value in sent.items() if name in DECIDING_HEADERS}
        path = scope["path"]
        entered = self._front.enter(path=path, method=scope["method"], **deciding)
        if isinstance(entered, Refused):
            error = ApiError(entered.status, entered.message, code=entered.code)
            return entered.status, entered.headers, shape_of(path)(error, "")
        try:
            # As vLLM: `curl -d` calls its body a form.
            if sent.get("content-type", "").partition(";")[0] != "application/json":
                error = ApiError(400, "Only 'application/json' is allowed")
                return 400, entered.headers, shape_of(path)(error, "")
            status, answer = await self._front.compute(entered.call, path, json.loads(body))
        finally:
            self._front.leave(entered.call)
        return status, entered.headers, _json(answer)


def _error(messages: bool, error: dict[str, Any]) -> dict[str, Any]:
    if not messages:
        return {"error": error}
    told = {"type": "invalid_request_error", "message": error["message"]}
    return {"type": "error", "error": told, "request_id": "r"}


def _json(answer: object) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode()


def _rendered(body: dict[str, Any]) -> str:
    if "prompt" in body:
        return str(body["prompt"])
    asked = "".join(f"<|{m['role']}|>{m['content']}<eos>" for m in body["messages"])
    return f"{asked}<|assistant|>"
