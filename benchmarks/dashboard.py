"""What the dashboard takes of a processor: 100 models, 16 instances, 500 events a second.

    python -m benchmarks.dashboard [--seconds 20] [--json FILE]

Every view is shown for so long, without a terminal. Printed are its share of one core (time of the
process, not of the clock) and how often it was brought up to date. Then keys are pressed while all
that goes on: digits one after the other, each timed until its view is there, and whole commands at
once, as fast fingers and pasted text come. Printed is how many had their effect. At last the most
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import statistics
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from textual import events

from benchmarks.dashboard_answers import answers
from tui.app import Dashboard
from tui.messages import AnswerPiece, DaemonRefused, Document, Kind, Message
from tui.views import VIEWS

MODELS, INSTANCES, REQUESTS = 100, 16, 400
EVENTS_PER_SECOND = 500
DELTAS_PER_SECOND = 4
SIZE = (160, 48)
WARM_SECONDS = 2.0
SLABS, RUNS = 8192, 400
"""Of each pool: what it is cut in, and pieces that have one owner."""
LOST_SECONDS: Final = 30.0
"""A key that had no effect by then never has one."""
COMMANDS: Final = 40


class Busy:
    """A daemon that has a lot to say. Implements `tui.messages.DaemonSource`."""

    name = "benchmark"
    live = True

    def __init__(self) -> None:
        self._dice = random.Random(0)
        self._numbers = iter(range(1, 10**9))
        self._tokens = dict.fromkeys((f"model-{n:03}" for n in range(MODELS)), 0)
        self._names = list(self._tokens)
        self._answers = answers(time.time(), self._names)

    async def follow(self) -> AsyncIterator[Message]:
        now = time.time()
        whole = {"unix_seconds": now, "missed": True, "state": self._state(now)}
        yield Message(now, Kind.STATE, whole)
        due = now
        while True:
            due += 1 / DELTAS_PER_SECOND
            await asyncio.sleep(max(0.0, due - time.time()))
            now = time.time()
            for _ in range(EVENTS_PER_SECOND // DELTAS_PER_SECOND):
                facts = {"id": f"chat-{self._dice.randrange(9999)}", "model": self._model()}
                number = next(self._numbers)
                notice = {"number": number, "unix_seconds": now, "kind": "request_ended"}
                yield Message(now, Kind.NOTICE, notice | {"facts": facts})
            yield Message(now, Kind.DELTA, {"unix_seconds": now, "patch": self._patch(now)})

    async def ask(self, method: str, path: str, body: object = None) -> Any:
        if path.endswith("/slabs"):
            return self._slabs()
        if (answer := self._answers.get(path)) is not None:
            return answer
        raise DaemonRefused("nobody answers")

    async def stream(self, path: str, body: object) -> AsyncIterator[AnswerPiece]:
        raise DaemonRefused("nobody answers")
        yield

    def _slabs(self) -> Document:
        """A pool that is torn to pieces."""
        owners = [{"name": "free", "moving": False}]
        owners += [{"name": f"{kind}:{name}", "moving": moving} for name in self._names[:6]
                   for kind in ("weights", "kv") for moving in (False, True)]  # fmt: skip
        cuts = sorted(self._dice.sample(range(1, SLABS), RUNS - 1))
        sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, SLABS], strict=True)]
        runs = [[self._dice.randrange(len(owners)), size] for size in sizes]
        return {"slab_bytes": 2 << 20, "owners": owners, "runs": runs}

    def _model(self) -> str:
        return self._dice.choice(self._names)

    def _state(self, now: float) -> Document:
        pool = {f"weights:{name}": 1 << 30 for name in self._names[:6]}
        return {
            "version": "0",
            "started_unix_seconds": now,
            "readiness": {"ok": True, "reasons": []},
            "host_bytes": {**{f"weights:{n}": 1 << 30 for n in self._names}, "free": 1 << 36},
            "instances": {
                str(n): {"instance": n, "role": "mixed", "state": "up", "pid": n,
                         "model": self._model(), "pool_bytes": {**pool, "free": 1 << 35}}
                for n in range(INSTANCES)
            },
            "models": {
                name: {"model": name, "state": "loaded", "running": 1, "waiting": 2,
                       "residency": {str(n): "cold" for n in range(INSTANCES)},
                       "window": {"attainment": 0.98, "ttft_p50_seconds": 0.3}}
                for name in self._names
            },
            "requests": {f"chat-{n}": self._request(n, now) for n in range(REQUESTS)},
            "spans": {},
        }  # fmt: skip

    def _request(self, number: int, now: float) -> Document:
        return {
            "id": f"chat-{number}", "model": self._model(), "phase": "running",
            "arrived_unix_seconds": now, "output_tokens": 0, "max_tokens": 99,
            "prompt_tokens": 9, "instance": number % INSTANCES, "kv": "device",
            "request_class": "interactive",
        }  # fmt: skip

    def _patch(self, now: float) -> Document:
        """Every instance went on, half of the models and of the requests have new tokens."""
        some = self._dice.sample(self._names, MODELS // 2)
        for name in some:
            self._tokens[name] += self._dice.randrange(50)
        return {
            "models": {name: {"output_tokens": self._tokens[name]} for name in some},
            "instances": {
                str(n): {"model": self._model(), "busy_seconds": now, "switches": int(now)}
                for n in range(INSTANCES)
            },
            "requests": {
                f"chat-{n}": {"output_tokens": self._dice.randrange(99)}
                for n in self._dice.sample(range(REQUESTS), REQUESTS // 2)
            },
            "spans": {
                str(next(self._numbers)): {
                    "number": 0, "instance": n, "kind": "turn", "model": self._model(),
                    "began_unix_seconds": now - 0.25, "ended_unix_seconds": now,
                }
                for n in range(INSTANCES)
            },
        }  # fmt: skip


class Counted(Dashboard):
    """Counts how often it is brought up to date."""

    updates = 0

    def refresh_shown(self) -> None:
        self.updates += 1
        super().refresh_shown()


async def until(holds: Callable[[], bool]) -> float | None:
    """Seconds until it holds; None if that is not to be waited for any more."""
    began = time.perf_counter()
    while not holds():
        if time.perf_counter() - began > LOST_SECONDS:
            return None
        await asyncio.sleep(0.001)
    return time.perf_counter() - began


async def press_digits(app: Dashboard, seconds: float) -> Document:
    """Each as soon as the view of the one before is there."""
    found: list[float | None] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for digit, kind in enumerate(VIEWS[:9], start=1):
            app.post_message(events.Key(str(digit), str(digit)))
            found.append(await until(lambda kind=kind: isinstance(app.view, kind)))  # type: ignore[misc]
    took = [seconds * 1e3 for seconds in found if seconds is not None]
    told = {"pressed": len(found), "without_effect": len(found) - len(took),
            "median_ms": statistics.median(took) if took else None,
            "max_ms": max(took, default=None)}  # fmt: skip
    line = f"{'digits':10} {told['pressed']} pressed, {told['without_effect']} without effect"
    if took:
        line += f"; median {told['median_ms']:.0f} ms, at most {told['max_ms']:.0f} ms"
    print(line)
    return told


async def type_commands(app: Dashboard) -> Document:
    """Every letter of a command, and Enter, before the first of them was looked at."""
    pressed = lost = 0
    for number in range(COMMANDS):
        kind = VIEWS[(number + 1) % len(VIEWS)]
        text = f":{kind.names[0]}"
        for character in text:
            name = "colon" if character == ":" else character
            app.post_message(events.Key(name, character))
        app.post_message(events.Key("enter", "\r"))
        pressed += len(text) + 1
        if await until(lambda kind=kind: isinstance(app.view, kind)) is None:  # type: ignore[misc]
            lost += 1
    print(f"{'commands':10} {COMMANDS} of {pressed} keys, {lost} without effect")
    return {"commands": COMMANDS, "pressed": pressed, "without_effect": lost}


async def measure(seconds: float) -> Document:
    result: Document = {"seconds": seconds, "views": {}}
    app = Counted(Busy())
    async with app.run_test(size=SIZE):
        for kind in VIEWS:
            app.show_view(kind.names[0])
            await asyncio.sleep(WARM_SECONDS)
            cpu, clock, updates = time.process_time(), time.perf_counter(), app.updates
            await asyncio.sleep(seconds)
            passed = time.perf_counter() - clock
            took = (time.process_time() - cpu) / passed
            often = (app.updates - updates) / passed
            print(f"{kind.title:10} {took:6.1%} of a core, {often:.1f} updates/s")
            result["views"][kind.names[0]] = {"core_share": took, "updates_per_second": often}
        result["digits"] = await press_digits(app, seconds)
        result["typed"] = await type_commands(app)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{'memory':10} {most / 1024:6.0f} MiB")
    result |= {"memory_mib": most / 1024, "load_average": os.getloadavg(), "cpus": os.cpu_count(),
               "python": platform.python_version(), "textual": version("textual")}  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = asyncio.run(measure(options.seconds))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
