"""The ledger of usage under kills: are its sums those of the clients, and what does it cost?

    python -m benchmarks.usage [--requests 100000] [--keys 20] [--kills 8] [--json FILE]

The daemon's own HTTP server, keys, sessions, admission and ledger, in a process that is killed and
started again; half of the ends are SIGTERM. The engine and vLLM's front half are doubles: a process
with vLLM takes a minute to start on a small machine, and computes a few requests a second there.
`tests/system/test_usage.py` has the same with real ones, and some hundred requests.

Each key has a client, which asks one thing after the other and adds up what it was told. An answer
that breaks off with the daemon may be in the ledger or not: a client cannot know, and asks the
ledger for it. All other sums have to agree to the token.

What it costs is processor time of the server for a request, with the ledger and without, in turns.
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
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import uvicorn

from appliance.access.admission import Admission
from appliance.access.auth import Access
from appliance.access.keys import Key, KeyFile, KeyRing, Scope, digest
from appliance.api.app import create_app
from appliance.gateway.accounts import Accounts
from appliance.gateway.sessions import FrontSettings, Sessions
from appliance.usage.entries import Amounts, Entry
from appliance.usage.ledger import Ledger
from benchmarks.http_tax import processor_seconds
from benchmarks.provenance import made_on_cpu
from tests.unit.doubles.fake_service import FakeGeneration, FakeService
from tests.unit.doubles.front import FrontDouble, Fronted

MODELS: Final = ("small", "org/small")
MOST_TOKENS: Final = 16
PAUSE_SECONDS: Final = 0.05
"""After how long a client asks again that was not answered."""

Sums = dict[tuple[str, str], Amounts]
"""By key and model."""


# --- the server ----------------------------------------------------------------------------------


class NamedFront(FrontDouble):
    """Answers a chat under the name that its client gave the request (`user`)."""

    async def compute(self, call: int, path: str, body: dict[str, Any]) -> tuple[int, object]:
        name, text = body["user"], body["messages"][0]["content"]
        self.sent.clear()
        self.submit(call, name, text, model=body["model"], max_tokens=MOST_TOKENS)
        await self.until_over(name)
        for known in (self.ends, self.timings, self.details):
            known.pop(name, None)
        said = len(self.tokens.pop(name, ()))
        if name in self.refused:
            return self.refused.pop(name).status, {}
        return 200, {"usage": {"prompt_tokens": len(text), "completion_tokens": said}}


class Sized(Fronted):
    """Its answers say how long they are."""

    async def _answered(self, scope: Any, body: bytes) -> tuple[int, Any, bytes]:
        status, headers, answer = await super()._answered(scope, body)
        return status, [*headers, ("content-length", str(len(answer)))], answer


def answer(generation: FakeGeneration) -> None:
    """Say as many tokens as the prompt's length decides."""
    generation.feed([7] * (1 + len(generation.request.prompt) % MOST_TOKENS))
    generation.say("!")
    generation._service.submitted.clear()
    generation._service.arrivals = asyncio.Queue()


async def serve(folder: Path, listener: int, ledger: Ledger | None) -> None:
    """Until SIGTERM."""
    access = Access(KeyRing(folder / "keys.json"))
    service = FakeService(answer)
    admission = Admission(service, access)  # type: ignore[arg-type]
    settings = FrontSettings(keep_alive_seconds=5.0, max_body_bytes=1 << 20)
    accounts = Accounts(access, ledger)
    sessions = Sessions(service, access, admission, settings, accounts)  # type: ignore[arg-type]
    app = create_app(service, access=access, admission=admission, ledger=ledger)  # type: ignore[arg-type]
    config = uvicorn.Config(Sized(app, NamedFront(sessions)), log_config=None, lifespan="off")
    await uvicorn.Server(config).serve([socket.socket(fileno=listener)])
    if ledger is not None:
        await ledger.aclose()


def ledger_in(folder: Path) -> Ledger:
    ledger = Ledger(folder / "usage", keep_months=13, max_rows=10_000, now=time.time)
    ledger.open()
    return ledger


class Server:
    """A process that serves, on a socket that outlives it."""

    def __init__(self, folder: Path, listener: socket.socket, *, counts: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.usage", "--serve", str(folder)]
        command += ["--listener", str(listener.fileno()), *(["--counts"] if counts else [])]
        self.process = subprocess.Popen(command, pass_fds=[listener.fileno()])

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait()


# --- the clients ---------------------------------------------------------------------------------


class Clients:
    """One for each key. `sums` are what they were told, `broken` the requests whose answers broke
    off, by name."""

    def __init__(self, keys: int, requests: int, port: int) -> None:
        self.sums: defaultdict[tuple[str, str], Amounts] = defaultdict(Amounts)
        self.broken: set[str] = set()
        self.whole = 0
        self._keys = keys
        self._requests = requests
        self._port = port
        self._held = asyncio.Event()
        self._held.set()

    def hold(self) -> None:
        """Ask nothing until `go_on`: no daemon is there, and what broke off is looked up."""
        self._held.clear()

    def go_on(self) -> None:
        self._held.set()

    async def run(self) -> None:
        share, more = divmod(self._requests, self._keys)
        await asyncio.gather(
            *(self._run(f"key-{key}", share + (key < more)) for key in range(self._keys))
        )

    async def _run(self, key: str, requests: int) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        asked = done = 0
        while done < requests:
            await self._held.wait()
            asked += 1
            name, model = f"{key}-{asked}", MODELS[asked % len(MODELS)]
            try:
                if connection is None:
                    connection = await asyncio.open_connection("127.0.0.1", self._port)
                usage = await _ask(*connection, key, name, model, "x" * (1 + asked % 37))
            except (OSError, asyncio.IncompleteReadError):
                self.broken.add(name)
                connection = None
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            amounts = Amounts(1, usage["prompt_tokens"], 0, usage["completion_tokens"])
            self.sums[key, model] += amounts
            done += 1
            self.whole += 1
        if connection is not None:
            connection[1].close()

    async def until_whole(self, count: int) -> None:
        while self.whole < count:  # noqa: ASYNC110 - answers come from all clients
            await asyncio.sleep(0.01)

    def look_up(self, entries: Iterable[Entry]) -> int:
        """Take what the ledger has of answers that broke off; how many it has."""
        found = [entry for entry in entries if entry.request in self.broken]
        for entry in found:
            self.broken.discard(entry.request)
            if entry.outcome == "whole":
                self.sums[entry.key, entry.model] += entry.amounts
        return len(found)


async def _ask(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    key: str,
    name: str,
    model: str,
    text: str,
) -> dict[str, int]:
    """The usage in the answer. Raises `OSError` if there is none."""
    asked = {"model": model, "user": name, "messages": [{"role": "user", "content": text}]}
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer sk-{key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    said = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    size = next(line for line in said.splitlines() if line.startswith("content-length:"))
    answered = await reader.readexactly(int(size.partition(":")[2]))
    if " 200 " not in said.partition("\r\n")[0]:
        raise OSError(said.partition("\r\n")[0])
    usage: dict[str, int] = json.loads(answered)["usage"]
    return usage


def make_keys(folder: Path, keys: int) -> None:
    file = KeyFile(folder / "keys.json")
    for number in range(keys):
        name = f"key-{number}"
        secret = digest(f"sk-{name}")
        file.add(Key(name=name, sha256=secret, created_seconds=0.0, scopes=(Scope.INFER,)))


# --- whether it agrees ---------------------------------------------------------------------------


async def compare(
    folder: Path, keys: int, requests: int, kills: int, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Ask so much while the server is killed and restarted so often; what came of it."""
    make_keys(folder, keys)
    looked_up = broken = 0
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        clients = Clients(keys, requests, listener.getsockname()[1])
        server = Server(folder, listener, counts=True)
        running = asyncio.create_task(clients.run())
        began = time.monotonic()
        try:
            for number in range(1, kills + 1):
                reached = clients.until_whole(requests * number // (kills + 1))
                waiting = asyncio.ensure_future(reached)
                await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    waiting.cancel()
                    break
                end = signal.SIGTERM if number % 2 == 0 else signal.SIGKILL
                await asyncio.to_thread(server.end, end)
                clients.hold()
                await asyncio.sleep(2 * PAUSE_SECONDS)  # all that broke off is known
                broken += len(clients.broken)
                ledger = ledger_in(folder)
                looked_up += clients.look_up(ledger.books.recent())
                await ledger.aclose()
                clients.broken.clear()
                server = Server(folder, listener, counts=True)
                clients.go_on()
                say(f"{clients.whole} answers, {number} ends, {broken} broke off")
            await running
        finally:
            running.cancel()
            await asyncio.to_thread(server.end, signal.SIGTERM)
        seconds = time.monotonic() - began
    ledger = ledger_in(folder)
    found: defaultdict[tuple[str, str], Amounts] = defaultdict(Amounts)
    for cell, amounts in ledger.books.rows():
        if cell.outcome == "whole":
            found[cell.key, cell.model] += amounts
    await ledger.aclose()
    told, had = _counts(clients.sums), _counts(found)
    return {
        "keys": keys,
        "whole_answers": clients.whole,
        "ends": kills,
        "broke_off": broken,
        "of_these_in_the_ledger": looked_up,
        "ledger_requests": sum(requests for requests, _, _ in had.values()),
        "differences": sum(told.get(at) != had.get(at) for at in told.keys() | had.keys()),
        "seconds": seconds,
    }


def _counts(sums: Sums) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {
        at: (one.requests, one.input_tokens, one.output_tokens) for at, one in sums.items() if one
    }


# --- what it costs -------------------------------------------------------------------------------


async def cost(keys: int, requests: int, *, counts: bool) -> tuple[float, float]:
    """Processor seconds of the server, and seconds, for each request."""
    with (
        tempfile.TemporaryDirectory() as name,
        socket.create_server(("127.0.0.1", 0), backlog=512) as listener,
    ):
        make_keys(Path(name), keys)
        port = listener.getsockname()[1]
        server = Server(Path(name), listener, counts=counts)
        try:
            await Clients(keys, keys * 20, port).run()
            before, began = processor_seconds(server.process.pid)[0], time.monotonic()
            await Clients(keys, requests, port).run()
            seconds = time.monotonic() - began
            used = processor_seconds(server.process.pid)[0] - before
        finally:
            server.end(signal.SIGTERM)
    return used / requests, seconds / requests


async def measure(keys: int, requests: int, rounds: int) -> dict[str, Any]:
    ratios: list[float] = []
    latencies: list[float] = []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        found = {counts: await cost(keys, requests, counts=counts) for counts in order}
        ratios.append(found[True][0] / found[False][0])
        latencies.append(found[True][1] / found[False][1])
    return {
        "requests": requests,
        "processor_ratios": ratios,
        "processor_ratio": statistics.median(ratios),
        "time_ratio": statistics.median(latencies),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="of costs; 0 for none")
    parser.add_argument("--cost-requests", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--listener", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--counts", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        ledger = ledger_in(given.serve) if given.counts else None
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(given.serve, given.listener, ledger))
        return
    with tempfile.TemporaryDirectory() as name:
        agreed = asyncio.run(compare(Path(name), given.keys, given.requests, given.kills))
    found = {"agreed": agreed} | made_on_cpu()
    print(json.dumps(found, indent=2), flush=True)
    if given.rounds:
        costs = asyncio.run(measure(given.keys, given.cost_requests, given.rounds))
        found["costs"] = costs
        print(json.dumps(costs, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(1 if agreed["differences"] else 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main()
