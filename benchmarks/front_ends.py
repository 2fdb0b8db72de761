"""What a front end costs per token, and an API process of `vllm serve`: the same streams from both.

    python -m benchmarks.front_ends [--streams 256] [--tokens 128] [--rounds 5] [--json FILE]

Behind both stands an engine that computes nothing: one token for every stream at a time, one frame
for all of them. Clients stream chats over connections of their own. The servers are up at the same
time and asked in turns, the first one last in the next round. Both run on processor 0, clients and
engines on processor 1, so that a server that is busy all the time shows its limit.

Two paces: *paced*, where a server has time to send every token in a chunk of its own, and *as fast
as it can*, where tokens wait and leave together. A figure is tokens per second of the server's own
processor time (user and system), prompts included: on a processor of its own that is its limit. A
ratio is of one round; what is written is their median.

`vllm serve` here has no engine process: outputs come over a Unix socket in the encoding of vLLM's
processes, one message for each step, and ZeroMQ's own threads are spared. The stand-in core of the
front ends is that of their tests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.http_tax import processor_seconds
from benchmarks.provenance import made_on_cpu

CONTEXT_TOKENS: Final = 2048
MODELS: Final = 12
SERVER_CPU: Final = 0
CLIENT_CPU: Final = 1
PATIENCE_SECONDS: Final = 300.0
FIRST_TOKEN: Final = 300
TOKENS: Final = 150
"""Ids of whole words: every token is text at once."""
LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Server:
    """One under test. `pause` sets the seconds between two steps of what stands behind it."""

    pid: int
    port: int
    models: tuple[str, ...]
    pause: Any


# --- clients -------------------------------------------------------------------------------------


class Stream(asyncio.Protocol):
    """One chat. It reads bytes and looks at none but the last."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.chunks = 0
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.chunks += 1
        self._tail = (self._tail + data)[-2000:]
        if self._tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and not self.done.done():
            self.done.set_result(self._tail)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"a stream ended early: {self._tail!r}"))


def _request(port: int, model: str, number: int, tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": f"chat {number} about rivers and bridges"}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def round_of(server: Server, streams: int, tokens: int) -> dict[str, float]:
    """All streams at once; tokens per processor second, and reads of clients per token."""
    loop = asyncio.get_running_loop()
    before, began = sum(processor_seconds(server.pid)), loop.time()
    opened = [
        await loop.create_connection(
            lambda number=number: Stream(
                _request(server.port, server.models[number % len(server.models)], number, tokens)
            ),
            "127.0.0.1",
            server.port,
        )
        for number in range(streams)
    ]
    async with asyncio.timeout(PATIENCE_SECONDS):
        tails = await asyncio.gather(*(stream.done for _, stream in opened))
    taken, seconds = sum(processor_seconds(server.pid)) - before, loop.time() - began
    for transport, _ in opened:
        transport.close()
    wanted = b'"completion_tokens":%d' % tokens
    if not all(wanted in tail for tail in tails):
        raise SystemExit(f"an answer has not {tokens} tokens: {tails[0].decode()}")
    total = streams * tokens
    return {
        "tokens_per_processor_second": total / taken,
        "tokens_per_second": total / seconds,
        "reads_per_token": sum(stream.chunks for _, stream in opened) / total,
    }


# --- front ends ----------------------------------------------------------------------------------


@asynccontextmanager
async def front_ends(checkpoint: Path, count: int) -> AsyncIterator[list[Server]]:
    """So many front ends, each with a stand-in for the core."""
    from appliance.service.front_frames import FrontModel
    from appliance.vocabulary import Task
    from tests.frontend.stand_in_core import StandInCore, front_end

    models = tuple(
        FrontModel(
            name=f"model-{number}",
            path=str(checkpoint),
            dtype="float32",
            max_context=CONTEXT_TOKENS,
            max_batch=256,
            task=Task.GENERATE,
            created=0,
        )
        for number in range(MODELS)
    )
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for _ in range(count):
            core: StandInCore = await stack.enter_async_context(front_end(models))
            core.keep_frames = False
            core.saying = lambda submit: _tokens(submit.max_tokens)
            assert core.process is not None
            names = tuple(model.name for model in models)

            def pause(seconds: float, core: StandInCore = core) -> None:
                core.step_seconds = seconds

            servers.append(Server(core.process.pid, core.port, names, pause))
        yield servers


def _tokens(count: int) -> list[int]:
    return [FIRST_TOKEN + (i * 7) % TOKENS for i in range(count)]


# --- vllm serve ----------------------------------------------------------------------------------


class StandInEngine:
    """The engine's end of a socket: one token for every request at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._left: dict[str, int] = {}
        self._work = asyncio.Event()
        self.step_seconds = 0.0

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._sock)
        computing = asyncio.create_task(self._compute(writer))
        try:
            while True:
                head = await reader.readexactly(LENGTH.size)
                asked = json.loads(await reader.readexactly(*LENGTH.unpack(head)))
                self._left |= asked
                self._work.set()
        except asyncio.IncompleteReadError:
            computing.cancel()

    async def _compute(self, writer: asyncio.StreamWriter) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.serial_utils import MsgpackEncoder

        encoder, step = MsgpackEncoder(), 0
        while True:
            if not self._left:
                self._work.clear()
                await self._work.wait()
            step += 1
            token = FIRST_TOKEN + (step * 7) % TOKENS
            outputs = []
            for request, left in list(self._left.items()):
                self._left[request] = left - 1
                if left == 1:
                    del self._left[request]
                reason = FinishReason.LENGTH if left == 1 else None
                outputs.append(
                    EngineCoreOutput(
                        request_id=request, new_token_ids=[token], finish_reason=reason
                    )
                )
            (data,) = encoder.encode(EngineCoreOutputs(outputs=outputs))
            writer.write(LENGTH.pack(len(data)) + bytes(data))
            await writer.drain()
            await asyncio.sleep(self.step_seconds)


@asynccontextmanager
async def vllm_serve(checkpoint: Path) -> AsyncIterator[Server]:
    """The API process of `vllm serve`, with a stand-in for its engine."""
    mine, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.front_ends", "--serve", str(theirs.fileno())),
            *(str(checkpoint), str(port)),
            pass_fds=(theirs.fileno(),),
            stdout=log,
            stderr=log,
        )
        theirs.close()
        engine = StandInEngine(mine)
        running = asyncio.create_task(engine.run())
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await _listens(port):
                    if process.returncode is not None:
                        log.seek(0)
                        raise SystemExit(f"`vllm serve` did not start: {log.read().decode()}")
                    await asyncio.sleep(0.2)

            def pause(seconds: float) -> None:
                engine.step_seconds = seconds

            yield Server(process.pid, port, ("model-0",), pause)
        finally:
            running.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def serve(descriptor: int, checkpoint: str, port: int) -> None:
    """Be the API process of `vllm serve`."""
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.serial_utils import MsgpackDecoder

    class Client:
        """Stands for vLLM's client of its engine process."""

        engine_ranks_managed: Final = [0]
        resources = type("Resources", (), {"engine_dead": False})()

        def __init__(self) -> None:
            self._link: Any = None
            self._decoder = MsgpackDecoder(EngineCoreOutputs)

        async def _opened(self) -> Any:
            if self._link is None:
                sock = socket.socket(fileno=descriptor)
                self._link = asyncio.create_task(
                    asyncio.open_connection(sock=sock, limit=1 << 24)  # type: ignore[arg-type]
                )
            return await self._link

        async def get_supported_tasks_async(self) -> tuple[str, ...]:
            return ("generate",)

        async def add_request_async(self, request: Any) -> None:
            _, writer = await self._opened()
            data = json.dumps({request.request_id: request.sampling_params.max_tokens}).encode()
            writer.write(LENGTH.pack(len(data)) + data)

        async def abort_requests_async(self, requests: list[str]) -> None:
            pass

        async def get_output_async(self) -> EngineCoreOutputs:
            reader, _ = await self._opened()
            head = await reader.readexactly(LENGTH.size)
            return self._decoder.decode(await reader.readexactly(*LENGTH.unpack(head)))

        async def reset_mm_cache_async(self) -> None:
            pass

        def shutdown(self, timeout: float | None = None) -> None:
            pass

    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: Client())
    told = ["--model", checkpoint, "--served-model-name", "model-0", "--dtype", "float32"]
    told += ["--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "256", "--enforce-eager"]
    told += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    uvloop.run(run_server(make_arg_parser(FlexibleArgumentParser()).parse_args(told)))


# --- the comparison ------------------------------------------------------------------------------


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    from appliance.demo.checkpoints import make_checkpoints

    found: dict[str, Any] = {
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        "models": MODELS,
        "made": made_on_cpu(),
    }
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoints(Path(folder), ["llama-a"])[0]
        os.sched_setaffinity(0, {SERVER_CPU})  # those that are started inherit it
        async with contextlib.AsyncExitStack() as stack:
            first, second = await stack.enter_async_context(front_ends(checkpoint, 2))
            servers = {
                "front_end": first,
                "vllm": await stack.enter_async_context(vllm_serve(checkpoint)),
            }
            os.sched_setaffinity(0, {CLIENT_CPU})
            for pace, pause in (("paced", arguments.pause), ("as_fast_as_it_can", 0.0)):
                for server in servers.values():
                    server.pause(pause)
                    await round_of(server, arguments.streams, arguments.tokens)  # to warm it
                rounds = []
                for number in range(arguments.rounds):
                    names = sorted(servers, reverse=number % 2 == 1)
                    rounds.append(
                        {
                            name: await round_of(servers[name], arguments.streams, arguments.tokens)
                            for name in names
                        }
                    )
                found[pace] = _summed_up(pace, rounds)
            found["two_front_ends"] = await _two(first, second, arguments)
    return found


def _summed_up(pace: str, rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        name: {
            figure: round(statistics.median(one[name][figure] for one in rounds), 3)
            for figure in rounds[0][name]
        }
        for name in sorted(rounds[0])
    }
    rate = "tokens_per_processor_second"
    each = [one["front_end"][rate] / one["vllm"][rate] for one in rounds]
    summary["ratio"], summary["ratios"] = round(statistics.median(each), 3), each
    print(f"{pace}:")
    for name in sorted(rounds[0]):
        print(f"  {name:10} {summary[name]}")
    print(f"  front end over vLLM: {summary['ratio']:.3f}  {[round(one, 3) for one in each]}")
    return summary


async def _two(first: Server, second: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both at once, each with half of the streams: whether they are in each other's way."""
    for server in (first, second):
        server.pause(arguments.pause)
        await round_of(server, arguments.streams // 2, arguments.tokens)
    _move(second, CLIENT_CPU)
    rate, alone, together = "tokens_per_processor_second", [], []
    for _ in range(arguments.rounds):
        alone.append((await round_of(first, arguments.streams // 2, arguments.tokens))[rate])
        both = await asyncio.gather(
            *(
                round_of(server, arguments.streams // 2, arguments.tokens)
                for server in (first, second)
            )
        )
        together.append(sum(one[rate] for one in both))
    scale = [two / one for two, one in zip(together, alone, strict=True)]
    print(f"two front ends over one: {statistics.median(scale):.3f} {scale}")
    return {"one": alone, "two": together, "ratio": round(statistics.median(scale), 3)}


def _move(server: Server, processor: int) -> None:
    for thread in Path(f"/proc/{server.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {processor})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.15, help="seconds between paced steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        descriptor, checkpoint, port = arguments.serve
        serve(int(descriptor), checkpoint, int(port))
        return
    found = asyncio.run(compare(arguments))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
