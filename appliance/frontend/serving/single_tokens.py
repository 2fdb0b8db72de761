"""Tool parsers read streams one token at a time, however many tokens arrive at once.

Several tokens arrive at once after a preemption, from a turn, or while a client is slow. Many of
vLLM's tool parsers then say something else than they say of the same tokens one by one: `hermes`
adds `{}` to a call's arguments, `xlam` and `functiongemma` lose arguments. vLLM's output collector
adds outputs together that wait; this one keeps them apart for requests with tools where the model's
parser needs that.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, async_llm
from vllm.v1.engine.output_processor import RequestOutputCollector

from appliance.frontend.calls import current
from appliance.frontend.serving.parsing.without_tools import may_call


class Collector(RequestOutputCollector):  # type: ignore[misc]  # vLLM has no types
    """vLLM's collector of a request's outputs, which can keep them apart. What waits is bounded:
    no more is computed for a client that does not read."""

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        super().__init__(output_kind, request_id)
        self._apart = False
        self._waiting: deque[RequestOutput] = deque()

    def keep_apart(self) -> None:
        """Give outputs of a stream one by one from now on."""
        self._apart = self.aggregate

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            self._waiting.clear()  # it ends the stream
        elif isinstance(self.output, Exception):
            return
        if self._apart and self.output is not None and isinstance(output, RequestOutput):
            self._waiting.append(output)
        else:
            super().put(output)

    async def get(self) -> RequestOutput | PoolingRequestOutput:
        output = await super().get()
        self._bring_next()
        return output

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        output = super().get_nowait()
        self._bring_next()
        return output

    def _bring_next(self) -> None:
        if self._waiting:
            super().put(self._waiting.popleft())


def split(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """An output of several tokens as outputs of one; O(tokens). The last says how it ends."""
    tokens = output.new_token_ids
    if len(tokens) < 2:
        return [output]
    outputs = [
        EngineCoreOutput(request_id=output.request_id, new_token_ids=[token])
        for token in tokens[:-1]
    ]
    output.new_token_ids = tokens[-1:]
    return [*outputs, output]


def replace_collector() -> None:
    """Have every `AsyncLLM` of this process collect outputs so. Once."""
    async_llm.RequestOutputCollector = Collector


def ask_for_single_tokens(renderer: Any) -> None:
    """Change the parser of vLLM's renderer, in place: the streams of a request with tools come one
    token at a time."""
    parser = renderer.parser
    renderer.parser = type(f"{parser.__name__}OfSingleTokens", (_AsksForSingleTokens, parser), {})


class _AsksForSingleTokens(Parser):  # type: ignore[misc]  # vLLM has no types
    """It is asked to adjust each request that may call tools, before that is computed."""

    def adjust_request(self, request: Any) -> Any:
        if may_call(request):
            current.get().one_by_one = True
        return super().adjust_request(request)
