"""What Ray Serve in front of a box costs, beside the box asked directly: latency, TTFT, throughput.

    build/fleet/bin/python -m benchmarks.fleet_serve [--engine .venv/bin/python] [--json FILE]

Two boxes are measured. One is an empty handler, which answers at once: what is added to it is what
Serve takes, with the fleet's front and proxy. What Serve takes alone is measured beside it, with
two deployments of a few lines that pass on as many pieces. The other box is a daemon that serves
one of the demo's models on the processors, if `--engine` names the Python that it runs in.

Both ways to a box are there at the same time and asked in turns, the one first that was second in
the round before, so that whatever else the machine does meets both. A ratio is of one round; what
is written is the median of them, and all of them. The client is the same for both ways, and keeps
its connections. Beside ratios stands what Serve's proxy, the front and the box's proxy took of the
processors for a request, which hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
import aiohttp
import httpx
import ray
import uvicorn
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from appliance.demo.run import free_port
from appliance.fleet.ray_serve.application import boxes_running, deploy
from appliance.fleet.ray_serve.settings import (
    BOX_NAME,
    BOX_RESOURCE,
    BOX_URL,
    FRONT_RESOURCE,
    FleetSettings,
)

ROOT = Path(__file__).parents[1]
MODEL = "llama-a"
PATH = "/v1/chat/completions"
STORE_BYTES = 80 << 20
START_SECONDS = 600
PROCESSES = (b"ray::ProxyActor", b"ray::ServeReplica")


@dataclass
class Way:
    """What a client saw on one way in one round: seconds, and requests per second."""

    latencies: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    requests_per_second: float = 0.0
    alone_cpu_ms: float = 0.0
    """Of the fleet's processes, for one answer that is no stream."""
    stream_cpu_ms: float = 0.0
    """For one stream among many."""


@dataclass
class Round:
    """Of both ways."""

    direct: Way
    fleet: Way

    def figures(self) -> dict[str, float]:
        direct, fleet = self.direct, self.fleet
        median = statistics.median
        return {
            "direct_p50_ms": median(direct.latencies) * 1e3,
            "added_p50_ms": (median(fleet.latencies) - median(direct.latencies)) * 1e3,
            "ttft_ratio": median(fleet.ttfts) / median(direct.ttfts),
            "throughput_ratio": fleet.requests_per_second / direct.requests_per_second,
            "direct_requests_per_second": direct.requests_per_second,
            "fleet_cpu_ms_per_answer": fleet.alone_cpu_ms,
            "fleet_cpu_ms_per_stream": fleet.stream_cpu_ms,
        }


@dataclass
class Asked:
    """How much is asked in a round."""

    alone: int
    clients: int
    each: int
    tokens: int


def body(asked: Asked, number: int, stream: bool) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me about number {number}."}],
        "max_tokens": asked.tokens,
        "temperature": 0,
        "stream": stream,
    }


async def measure(url: str, asked: Asked) -> Way:
    """One way: requests one after the other, then many clients at once."""
    way = Way()
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=limits) as client:
        begun = fleet_cpu_seconds()
        for number in range(asked.alone):
            way.latencies.append(await _one(client, body(asked, number, False)))
        way.alone_cpu_ms = (fleet_cpu_seconds() - begun) * 1e3 / asked.alone
        for number in range(asked.alone):
            way.ttfts.append(await _one(client, body(asked, number, True)))

        async def several(first: int) -> None:
            for number in range(first, first + asked.each):
                await _one(client, body(asked, number, True), whole=True)

        begun = fleet_cpu_seconds()
        begin = time.perf_counter()
        await asyncio.gather(*(several(n * asked.each) for n in range(asked.clients)))
        seconds = time.perf_counter() - begin
    way.stream_cpu_ms = (fleet_cpu_seconds() - begun) * 1e3 / (asked.clients * asked.each)
    way.requests_per_second = asked.clients * asked.each / seconds
    return way


async def _one(client: aiohttp.ClientSession, said: dict[str, Any], whole: bool = False) -> float:
    """Seconds to the first bytes of a stream, else to the end of the answer."""
    begin = time.perf_counter()
    async with client.post(PATH, json=said) as answer:
        answer.raise_for_status()
        if not said["stream"]:
            await answer.read()
            return time.perf_counter() - begin
        await answer.content.readany()
        first = time.perf_counter() - begin
        await answer.read()
        return time.perf_counter() - begin if whole else first


def fleet_cpu_seconds() -> float:
    """What the processes on the way of a request took of the processors so far."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            named = (process / "cmdline").read_bytes()
            if named.startswith(PROCESSES):
                after_name = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(after_name[11]) + int(after_name[12])
        except OSError:
            continue  # it has gone
    return ticks / os.sysconf("SC_CLK_TCK")


async def compare(direct: str, fleet: str, asked: Asked, rounds: int) -> list[Round]:
    """Rounds in which each way is asked; an additional one before them is thrown away."""
    kept = []
    for number in range(rounds + 1):
        ways = [direct, fleet] if number % 2 else [fleet, direct]
        seen = {url: await measure(url, asked) for url in ways}
        if number:
            kept.append(Round(seen[direct], seen[fleet]))
    return kept


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Medians over rounds, and the rounds."""
    rows = [one.figures() for one in rounds]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {"median": medians, "rounds": rows}


# --- boxes ---------------------------------------------------------------------------------------


async def empty_box(scope: Any, receive: Any, send: Any) -> None:
    """A box with one model that answers at once."""
    if scope["type"] != "http":
        return
    said, more = b"", True
    while more:
        message = await receive()
        said, more = said + message.get("body", b""), message.get("more_body", False)
    kind, chunks = b"application/json", [b"{}"]
    if scope["path"] == "/api/load":
        chunks = [json.dumps({"catalogue": [MODEL], "resident": [MODEL]}).encode()]
    elif scope["path"] == PATH:
        asked = json.loads(said)
        if asked["stream"]:
            kind, chunks = b"text/event-stream", [b"data: {}\n\n"] * asked["max_tokens"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for chunk in chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@contextmanager
def process(command: list[str]) -> Iterator[str]:
    """A box in a process that writes its address, or a process id, when it is ready."""
    running = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert running.stdin is not None
    assert running.stdout is not None
    try:
        if not (said := running.stdout.readline().strip()):
            raise SystemExit(f"{' '.join(command)}: it did not start")
        yield said
    finally:
        running.stdin.close()
        running.wait(START_SECONDS)


class Back:
    """Says as much as the empty handler does."""

    async def __call__(self, pieces: int) -> AsyncIterator[bytes]:
        for _ in range(pieces):
            yield b"data: {}\n\n"


class Ingress:
    """Passes on what a `Back` says."""

    def __init__(self, back: Any) -> None:
        self._back = back.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        asked = await request.json()
        pieces = asked["max_tokens"] if asked["stream"] else 1
        return StreamingResponse(self._back.remote(pieces))


@contextmanager
def serving() -> Iterator[str]:
    """The address of Ray Serve on one node."""
    port = free_port()
    ray.init(
        address="local", num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False,
        resources={BOX_RESOURCE: 1, FRONT_RESOURCE: 1}, log_to_driver=False,
    )  # fmt: skip
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


@contextmanager
def serve_alone() -> Iterator[str]:
    """The address of two deployments that do nothing."""
    with serving() as front:
        options = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 1000}
        back = serve.deployment(Back, **options).bind()
        serve.run(serve.deployment(Ingress, **options).bind(back))
        yield front


@contextmanager
def in_fleet(url: str) -> Iterator[str]:
    """The address of a fleet of this one box, on one node."""
    os.environ |= {BOX_NAME: "box", BOX_URL: url, "PYTHONPATH": str(ROOT)}
    with serving() as front:
        deploy(FleetSettings())
        deadline = time.monotonic() + START_SECONDS
        while not boxes_running() or not knows_box(front):
            if time.monotonic() > deadline:
                raise SystemExit("the fleet does not know the box")
            time.sleep(0.2)
        yield front


def knows_box(front: str) -> bool:
    """Whether the box has said what it has to do."""
    rows = httpx.get(f"{front}/api/fleet", timeout=START_SECONDS).json().get("boxes", [])
    return any(row["load"] for row in rows)


def with_box(url: str, asked: Asked, rounds: int) -> dict[str, Any]:
    with in_fleet(url) as fleet:
        found = asyncio.run(compare(url, fleet, asked, rounds))
    return {"asked": asdict(asked)} | summary(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--engine", type=Path, help="the Python of a daemon, such as .venv's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--empty-box", type=int, metavar="PORT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.empty_box:
        print(given.empty_box, flush=True)
        uvicorn.run(empty_box, port=given.empty_box, log_level="warning")
        return
    port = free_port()
    found: dict[str, Any] = {"processors": os.cpu_count(), "ray": ray.__version__}
    url = f"http://127.0.0.1:{port}"
    asked = Asked(alone=40, clients=given.clients, each=8, tokens=32)
    command = [sys.executable, "-m", "benchmarks.fleet_serve", "--empty-box", str(port)]
    empty = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        found["empty handler"] = with_box(url, asked, given.rounds)
        with serve_alone() as alone:
            rounds = asyncio.run(compare(url, alone, asked, given.rounds))
        found["Serve alone"] = {"asked": asdict(asked)} | summary(rounds)
    finally:
        empty.terminate()
        empty.wait()
    if given.engine:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "box").mkdir()
            places = [f"{folder}/models", f"{folder}/box", str(port), MODEL, "--short-turns"]
            with process([str(given.engine), "-m", "tests.fleet.daemon", *places]):
                asked = Asked(alone=20, clients=given.clients, each=3, tokens=32)
                found["daemon"] = with_box(url, asked, given.rounds)
    text = json.dumps(found, indent=1)
    print(text)
    if given.json:
        given.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
