"""What asking over HTTP costs here and at `vllm serve`: requests/s and TTFT, same model, same box.

    python -m benchmarks.http_tax [--model llama-1k] [--batches 1 32] [--rounds 6] [--json FILE]

Both servers run the same checkpoint on the same processors. They are up at the same time and asked
in turns, the one first that was second in the round before, so that whatever else the machine does
meets both. A client keeps `batch` chats under way: each is streamed on a connection that is kept,
greedy, of `--tokens` tokens, and no prompt comes twice to the same server. TTFT is the time from
the request's last byte sent to the first piece that carries a token. The client reads bytes, and
parses none of them after the first token: it takes the same from both.

A ratio is of one round; what is written is the median of them, and all of them. Beside them stands
what the servers took of the processors for 1000 tokens, prompts included: the process that speaks
HTTP, and those behind it. Unlike times, that hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.recipes import RECIPES
from appliance.demo.run import free_port, running_daemon
from benchmarks.pool_tax import LARGER
from benchmarks.provenance import made_on_cpu

MAX_CONTEXT = 512
MAX_BATCH = 32
PATIENCE_SECONDS = 300
WORDS = ("river", "bridge", "glass", "winter", "map", "night", "copper", "letter", "garden", "salt")


@dataclass(frozen=True, slots=True)
class Round:
    """What a client saw of one server: requests per second, and each request's TTFT, seconds. And
    what the server took of the processors for it, seconds: in front, and behind that."""

    requests: int
    requests_per_second: float
    ttfts_seconds: list[float]
    front_seconds: float
    engine_seconds: float

    @property
    def ttft_seconds(self) -> float:
        return statistics.median(self.ttfts_seconds)


class Server(NamedTuple):
    """Where one listens; its process is the one that speaks HTTP."""

    pid: int
    port: int


class Client:
    """Chats with one server, a connection for each that is under way at once."""

    def __init__(self, server: Server, model: str, tokens: int, prompt_words: int) -> None:
        self._pid, self._port = server
        self._model = model
        self._tokens = tokens
        self._prompt_words = prompt_words
        self._sent = 0

    async def round(self, batch: int, requests: int) -> Round:
        """Send so many, `batch` at a time."""
        left = iter(range(requests))
        ttfts: list[float] = []

        async def one_after_the_other() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
            for _ in left:
                ttfts.append(await self._ask(reader, writer))
            writer.close()
            await writer.wait_closed()

        taken, began = processor_seconds(self._pid), time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(min(batch, requests))))
        seconds = time.perf_counter() - began
        front, behind = (
            now - before for before, now in zip(taken, processor_seconds(self._pid), strict=True)
        )
        return Round(requests, requests / seconds, ttfts, front, behind)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
        """The TTFT of one chat that has been read to its end."""
        writer.write(self._request())
        await writer.drain()
        sent = time.perf_counter()
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"port {self._port} answered {status!r}: {await reader.read(2000)!r}")
        ttft = 0.0
        while (line := await reader.readline()) != b"0\r\n":
            if not ttft and line.startswith(b"data: {") and _has_token(line):
                ttft = time.perf_counter() - sent
        await reader.readline()
        return ttft

    def _request(self) -> bytes:
        self._sent += 1
        chosen = random.Random(self._sent)
        words = " ".join(chosen.choice(WORDS) for _ in range(self._prompt_words))
        body = json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": f"{self._sent} {words}"}],
                "max_tokens": self._tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def processor_seconds(pid: int) -> tuple[float, float]:
    """What a process took of the processors so far, and what those took that descend from it."""
    front = 0.0
    total = 0.0
    waiting = [pid]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        try:
            # The name of a process is in brackets, and may hold anything.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            waiting += [
                int(child)
                for thread in (process / "task").iterdir()
                for child in (thread / "children").read_text().split()
            ]
        except OSError:  # gone meanwhile
            continue
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        front = front or seconds
        total += seconds
    return front, total - front


def _has_token(line: bytes) -> bool:
    choices = json.loads(line[6:])["choices"]
    return any(choice.get("token_ids") for choice in choices)


@contextmanager
def plain_vllm(directory: Path, model: str) -> Iterator[Server]:
    """`vllm serve` with this checkpoint."""
    port = free_port()
    # What `vllm serve` runs; the command itself wants a distribution that is called vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [
        "--model",
        str(directory / model),
        "--served-model-name",
        model,
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    command += ["--dtype", "float32", "--max-model-len", str(MAX_CONTEXT), "--enforce-eager"]
    command += ["--max-num-seqs", str(MAX_BATCH), "--kv-cache-memory-bytes", str(256 << 20)]
    command += ["--disable-uvicorn-access-log"]
    log = directory / "vllm.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _answers(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"`vllm serve` did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield Server(server.pid, port)
    finally:
        server.terminate()
        server.wait(60)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


async def compare(
    clients: dict[str, Client], batches: Sequence[int], rounds: int, requests: int
) -> dict[int, list[dict[str, Round]]]:
    """For each batch size, for each round, what each server did."""
    seen: dict[int, list[dict[str, Round]]] = {}
    for batch in batches:
        for client in clients.values():  # caches, allocators, connections
            await client.round(batch, 2 * batch)
        seen[batch] = []
        for number in range(rounds):
            order = list(clients) if number % 2 == 0 else list(reversed(clients))
            seen[batch].append(
                {name: await clients[name].round(batch, max(requests, 3 * batch)) for name in order}
            )
    return seen


def ratios(rounds: Sequence[dict[str, Round]]) -> dict[str, list[float]]:
    """Of each round, the appliance over vLLM."""
    return {
        "throughput": [
            r["appliance"].requests_per_second / r["vllm"].requests_per_second for r in rounds
        ],
        "ttft": [r["appliance"].ttft_seconds / r["vllm"].ttft_seconds for r in rounds],
    }


def report(batch: int, rounds: Sequence[dict[str, Round]], tokens: int) -> dict[str, object]:
    """The figures of one batch size, of answers of so many tokens; printed, too."""
    found: dict[str, object] = {"batch": batch}
    for name in ("appliance", "vllm"):
        rate = statistics.median(r[name].requests_per_second for r in rounds)
        ttft = statistics.median(r[name].ttft_seconds for r in rounds)
        kilotokens = tokens * sum(r[name].requests for r in rounds) / 1000
        front = sum(r[name].front_seconds for r in rounds) / kilotokens
        engine = sum(r[name].engine_seconds for r in rounds) / kilotokens
        found[name] = {
            "requests_per_second": round(rate, 3),
            "ttft_seconds": round(ttft, 5),
            "front_seconds_per_1000_tokens": round(front, 3),
            "engine_seconds_per_1000_tokens": round(engine, 3),
        }
        print(
            f"batch {batch:3} {name:10} {rate:8.2f} requests/s, TTFT {1e3 * ttft:8.2f} ms, "
            f"processors {front:.2f} + {engine:.2f} s per 1000 tokens"
        )
    for name, all_of_them in ratios(rounds).items():
        median = statistics.median(all_of_them)
        found[f"{name}_ratio"] = round(median, 3)
        found[f"{name}_ratios"] = [round(ratio, 3) for ratio in all_of_them]
        print(f"batch {batch:3} {name} over vLLM's: {median:.3f}  {found[f'{name}_ratios']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    recipes = {recipe.name: recipe for recipe in (*RECIPES, LARGER)}
    parser.add_argument("--model", default=LARGER.name, choices=sorted(recipes))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, MAX_BATCH])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=12, help="of a round, 3 x batch at least")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt-words", type=int, default=60)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_checkpoints(directory, [options.model], recipes=recipes.values())
        size = sum(
            file.stat().st_size for file in (directory / options.model).glob("*.safetensors")
        )
        memory = (size >> 20) + 256 + 64
        file = write_config(
            directory,
            [options.model],
            instances=1,
            memory=f"{memory}MiB",
            slab="2MiB",  # the daemon's default, which lies on huge pages; the demo's is smaller
            host_cache=f"{2 * memory}MiB",
            max_context=MAX_CONTEXT,
            bind=f"127.0.0.1:{free_port()}",
        )
        config = load_config(file)
        with (
            running_daemon(file, config) as (url, pid),
            plain_vllm(directory, options.model) as plain,
        ):
            ours = Server(pid, int(url.rpartition(":")[2]))
            clients = {
                name: Client(server, options.model, options.tokens, options.prompt_words)
                for name, server in (("appliance", ours), ("vllm", plain))
            }
            seen = asyncio.run(compare(clients, options.batches, options.rounds, options.requests))
    found = [report(batch, rounds, options.tokens) for batch, rounds in seen.items()]
    if options.json is not None:
        asked = {
            "model": options.model,
            "tokens": options.tokens,
            "prompt_words": options.prompt_words,
            "rounds": options.rounds,
            "load": os.getloadavg()[0],
        }
        options.json.write_text(json.dumps(made_on_cpu() | asked | {"batches": found}, indent=1))


if __name__ == "__main__":
    main()
