"""What hostile requests cost others: gaps of `/livez`, and another key's TTFT.

    python -m benchmarks.hostile [--rounds 5] [--seconds 8] [--processes 2] [--only KIND] \
        [--json FILE]

A daemon with two models of the demonstration, keys and two front ends. In each round, one after
the other: nothing; a process that only counts, which shows what it costs on this machine that
one processor is busy; then each kind of hostile client (`KINDS`), from a process of its own, which
sends the next request whenever one is answered. Meanwhile a third process asks `/livez` every 10
ms, and this one streams short chats with another key, one after the other, each on a connection of
its own.

A gap is the time between two answers of `/livez`; the largest one between two calls of its client's
timer, which the machine causes, is with it. A ratio is of one round: TTFT while hostile requests
come over TTFT without; what is written is the median of the rounds, and all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from appliance.access.keys import Key, KeyFile, Scope, digest
from appliance.demo.checkpoints import make_checkpoints, write_config
from appliance.demo.run import free_port
from benchmarks.provenance import made_on_cpu
from tests.hostile import bodies
from tests.hostile.bodies import CHAT
from tests.hostile.connections import half_sent_body

ATTACKED, ASKED = "llama-a", "qwen3-a"
AT_ONCE = 6
POLL_SECONDS = 0.01
REOPEN_SECONDS = 0.05
MESSAGES = 200_000
TOKENS = 8
GOAL_GAP_SECONDS = 0.1
GOAL_RATIO = 2.0
PATIENCE_SECONDS = 300
MALLORY, ALICE, OPERATOR = "mallory", "alice", "operator"


# --- hostile clients -----------------------------------------------------------------------------


class Kind(NamedTuple):
    """Requests of one kind, so many at a time."""

    bodies: Callable[[], Iterator[bytes]]
    at_once: int = AT_ONCE


NOTHING, COUNTING = "nothing", "a process that counts"
HALF_SENT_HEADS, HALF_SENT_BODIES = "1,500 half-sent heads", "60 half-sent bodies"
REQUESTS = {
    "8 MiB prompt": Kind(lambda: itertools.repeat(bodies.long_prompt(ATTACKED))),
    "8 MiB prompt, truncated": Kind(lambda: itertools.repeat(bodies.truncated_prompt(ATTACKED))),
    "150,000 tools": Kind(lambda: itertools.repeat(bodies.many_tools(ATTACKED, 150_000))),
    "200,000 empty messages": Kind(
        lambda: itertools.repeat(bodies.many_messages(ATTACKED, MESSAGES))
    ),
    "chains of rules": Kind(lambda: bodies.chains_of_rules(ATTACKED, 4000)),
    "ambiguous grammars": Kind(lambda: bodies.ambiguous_grammars(ASKED, 400)),
    "50,000 stop tokens": Kind(lambda: itertools.repeat(bodies.many_stop_tokens(ATTACKED, 50_000))),
    "128 sequences": Kind(lambda: bodies.many_sequences(ASKED, 128, 64), at_once=2),
}
KINDS = (*REQUESTS, HALF_SENT_HEADS, HALF_SENT_BODIES)


async def attack(url: str, kind: str) -> None:
    """Until standard input ends, and to the answers; prints how many were answered how."""
    if kind not in REQUESTS:
        await hold_connections(url, kind)
        return
    contents = REQUESTS[kind].bodies()
    headers = {"authorization": f"Bearer {secret(MALLORY)}", "content-type": "application/json"}
    answers: Counter[str] = Counter()
    seconds: list[float] = []

    told = asyncio.create_task(_until_told())

    async def one_after_the_other() -> None:
        while not told.done():
            content = next(contents)
            began = time.perf_counter()
            async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
                answer = await client.post(url + CHAT, content=content, headers=headers)
            seconds.append(time.perf_counter() - began)
            answers[str(answer.status_code)] += 1

    await asyncio.gather(*(one_after_the_other() for _ in range(REQUESTS[kind].at_once)))
    longest = max(seconds, default=0.0)
    print(json.dumps({"answers": answers, "longest_seconds": round(longest, 3)}))


async def hold_connections(url: str, kind: str) -> None:
    """Keep so many connections with half a request; one that is closed is opened again."""
    many, begun = 1500, b"POST /v1/completions HTTP/1.1\r\nHost: x"
    if kind == HALF_SENT_BODIES:
        many, begun = 60, half_sent_body(secret(MALLORY))
    told = asyncio.create_task(_until_told())
    again = 0

    async def hold() -> None:
        nonlocal again
        while not told.done():
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*url.split("//")[1].split(":"))
                writer.write(begun)
                await asyncio.wait(
                    (told, read := asyncio.create_task(reader.read())),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                read.cancel()
                writer.transport.abort()
            again += 1
            await asyncio.sleep(REOPEN_SECONDS)

    await asyncio.gather(*(hold() for _ in range(many)))
    print(json.dumps({"answers": {"closed": again - many}, "longest_seconds": 0.0}))


async def count() -> None:
    """Keep a processor busy until standard input ends."""
    told = asyncio.create_task(_until_told())
    while not told.done():
        sum(range(100_000))
        await asyncio.sleep(0)
    print(json.dumps({"answers": {}, "longest_seconds": 0.0}))


# --- /livez --------------------------------------------------------------------------------------


async def poll(port: int) -> None:
    """Ask every `POLL_SECONDS` until standard input ends; prints the largest gaps, in seconds."""
    told = asyncio.create_task(_until_told())
    answered: list[float] = []
    ticks: list[float] = []
    asking: set[asyncio.Task[None]] = set()

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        if not (await reader.readline()).startswith(b"HTTP/1.1 200"):
            raise SystemExit("/livez failed")
        answered.append(time.perf_counter())
        writer.close()

    while not told.done():
        ticks.append(time.perf_counter())
        task = asyncio.create_task(ask())
        asking.add(task)
        task.add_done_callback(asking.discard)
        await asyncio.sleep(POLL_SECONDS)
    await asyncio.gather(*asking)
    print(json.dumps({"gap": _largest_gap(answered), "own_gap": _largest_gap(ticks)}))


def _largest_gap(times: Sequence[float]) -> float:
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


async def _until_told() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


# --- the daemon ----------------------------------------------------------------------------------


def secret(name: str) -> str:
    return f"sk-{name}"


@contextmanager
def serving(folder: Path, processes: int) -> Iterator[int]:
    """A daemon with keys; its port."""
    port = free_port()
    make_checkpoints(folder, [ATTACKED, ASKED])
    file = write_config(folder, [ATTACKED, ASKED], bind=f"127.0.0.1:{port}", instances=1)
    told = f'[api]\nprocesses = {processes}\nkeys = "keys.json"\n'
    file.write_text(file.read_text().replace("[api]\n", told))
    keys = KeyFile(folder / "keys.json")
    for name in (MALLORY, ALICE, OPERATOR):
        scopes = (Scope.ADMIN,) if name == OPERATOR else (Scope.INFER,)
        sha256 = digest(secret(name))
        keys.add(Key(name=name, sha256=sha256, created_seconds=0.0, scopes=scopes))
    log = folder / "daemon.log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "appliance", "serve", "--config", str(file)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(port, daemon, log)
        yield port
    finally:
        daemon.terminate()
        daemon.wait(60)


def _wait_until_ready(port: int, daemon: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and daemon.poll() is None:
        try:
            headers = {"authorization": f"Bearer {secret(OPERATOR)}"}
            status = httpx.get(f"http://127.0.0.1:{port}/api/status", headers=headers, timeout=5)
            up = all(instance["state"] == "up" for instance in status.json()["instances"])
            if up and httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.1)
    raise SystemExit(f"the daemon did not get ready:\n{log.read_text()[-4000:]}")


# --- another key's streams -----------------------------------------------------------------------


async def ttfts(port: int, seconds: float) -> list[float]:
    """Of short chats, one after the other for so long, seconds; a connection is part of it."""
    end = time.perf_counter() + seconds
    found = [await _ttft(port)]
    while time.perf_counter() < end:
        found.append(await _ttft(port))
    return found


async def _ttft(port: int) -> float:
    body = json.dumps(
        {
            "model": ASKED,
            "messages": [{"role": "user", "content": f"{time.perf_counter_ns()} rivers"}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    ).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {secret(ALICE)}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    ttft = 0.0
    ended = False
    while line := await reader.readline():
        if not ttft and line.startswith(b"data: {"):
            choices = json.loads(line.removeprefix(b"data: "))["choices"]
            if any(choice.get("token_ids") for choice in choices):
                ttft = time.perf_counter() - began
        ended = ended or line.startswith(b"data: [DONE]")
    writer.close()
    if not (ttft and ended):
        raise SystemExit("a stream of another key did not come to its end")
    return ttft


# --- rounds --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen in one part of a round. Times are seconds."""

    livez_gap: float
    own_gap: float
    """Between two calls of the timer of the client of `/livez`."""
    ttfts: list[float]
    answers: dict[str, int]
    """Of hostile requests, by status."""
    longest: float
    """That a hostile request took."""


def observe(port: int, kind: str, seconds: float) -> Seen:
    """Short streams beside hostile requests of a kind, or another process."""
    url = f"http://127.0.0.1:{port}"
    attacker = None if kind == NOTHING else _helper("--beside", kind, "--at", url)
    if attacker is not None:
        time.sleep(1.0)  # six are under way
    poller = _helper("--poll", str(port))
    times = asyncio.run(ttfts(port, seconds))
    gaps = _end(poller)
    told = {"answers": {}, "longest_seconds": 0.0} if attacker is None else _end(attacker)
    return Seen(gaps["gap"], gaps["own_gap"], times, told["answers"], told["longest_seconds"])


def _helper(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.hostile", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def _end(helper: subprocess.Popen[bytes]) -> dict[str, Any]:
    output, _ = helper.communicate()
    told: dict[str, Any] = json.loads(output)
    return told


def report(kind: str, seen: Sequence[Seen], quiet: Sequence[Seen]) -> dict[str, Any]:
    """The figures of one kind; printed, too."""
    ratios = [
        statistics.median(one.ttfts) / statistics.median(other.ttfts)
        for one, other in zip(seen, quiet, strict=True)
    ]
    everything = [ttft for one in seen for ttft in one.ttfts]
    answers: Counter[str] = Counter()
    for one in seen:
        answers.update(one.answers)
    found = {
        "kind": kind,
        "livez_gap_seconds": round(max(one.livez_gap for one in seen), 4),
        "livez_gaps_seconds": [round(one.livez_gap, 4) for one in seen],
        "client_gaps_seconds": [round(one.own_gap, 4) for one in seen],
        "streams": len(everything),
        "ttft_seconds": round(statistics.median(everything), 4),
        "longest_ttft_seconds": round(max(everything), 4),
        "ttft_ratio": round(statistics.median(ratios), 3),
        "ttft_ratios": [round(ratio, 3) for ratio in ratios],
        "hostile_answers": dict(answers),
        "longest_hostile_seconds": max(one.longest for one in seen),
    }
    print(
        f"{kind:24} {1e3 * found['livez_gap_seconds']:8.1f} "
        f"{1e3 * max(found['client_gaps_seconds']):10.1f} "
        f"{1e3 * found['ttft_seconds']:9.1f} {1e3 * found['longest_ttft_seconds']:9.1f} "
        f"{found['ttft_ratio']:6.2f}  {found['ttft_ratios']}  {dict(answers)}"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a part of a round")
    parser.add_argument("--processes", type=int, default=2, help="front ends")
    parser.add_argument("--only", choices=KINDS, action="append", help="may be repeated")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--beside", help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    parser.add_argument("--poll", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.beside is not None:
        doing = count() if options.beside == COUNTING else attack(options.at, options.beside)
        asyncio.run(doing)
        return
    if options.poll is not None:
        asyncio.run(poll(options.poll))
        return
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), options.processes) as port:
        for _ in range(options.processes):  # engines and front halves are built
            asyncio.run(ttfts(port, 1.0))
        kinds = options.only or KINDS
        for kind in kinds:
            observe(port, kind, 1.0)
        seen: dict[str, list[Seen]] = {kind: [] for kind in (NOTHING, COUNTING, *kinds)}
        for _ in range(options.rounds):
            for kind, parts in seen.items():
                parts.append(observe(port, kind, options.seconds))
        died = (Path(folder) / "daemon.log").read_text(errors="replace").count("a front end died")
    print(
        f"{'beside':24} {'livez ms':>8} {'client ms':>10} {'TTFT ms':>9} {'longest':>9} "
        f"{'ratio':>6}  of each round"
    )
    beside = [report(kind, parts, seen[NOTHING]) for kind, parts in seen.items()]
    found = {"beside": beside, "front_ends_died": died}
    print(f"front ends that died: {died}")
    if options.json is not None:
        asked = {
            "model": ASKED,
            "attacked": ATTACKED,
            "front_ends": options.processes,
            "at_once": AT_ONCE,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "tokens": TOKENS,
            "goals": {"livez_gap_seconds": GOAL_GAP_SECONDS, "ttft_ratio": GOAL_RATIO},
            "load": os.getloadavg()[0],
        }
        options.json.write_text(json.dumps(made_on_cpu() | asked | found, indent=1))


if __name__ == "__main__":
    main()
