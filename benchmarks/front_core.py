"""How many tokens per second the core forwards: from a worker's frames to those of a front end.

    python -m benchmarks.front_core [--streams 256] [--models 12] [--rounds 5] [--json FILE]

The core is the daemon's own, with its machine, sessions and accounting; workers and the front end
are doubles in the same process. Each of `models` has an instance, and one token of every stream is
computed at a time. What is timed is what the core does with a step's tokens: a worker's frame is
decoded, the machine and the streams hear of it, the loop turns once, and what is new is encoded for
the front end. Seconds are processor time of one thread. What follows a turn (the next one is
decided, and the doubles take its orders) is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any, Final

import pytest

from appliance import framing
from appliance.access.admission import Admission
from appliance.access.auth import Access
from appliance.gateway.sessions import FrontSettings, Sessions
from appliance.service.front_frames import VERSION, Enter, Hello, Ready, Submit
from appliance.worker import frames
from benchmarks.provenance import made_on_cpu
from tests.unit.doubles.daemon import Box, Limits, setup_of, small
from tests.unit.doubles.instance import Life

PROMPT_TOKENS: Final = 20
OUTPUT_TOKENS: Final = 200


class Forwarding:
    """A core with streams under way."""

    def __init__(self, models: int, streams: int) -> None:
        names = "abcdefghijklmnopqrstuvwxyz"[:models]
        doubles = small(names)
        self.box = Box(
            pytest.MonkeyPatch(),
            doubles,
            setup_of(doubles, instances=models, host_slabs=4000),
            slabs=400,
            limits=Limits(queue=2 * streams, progress_seconds=60.0),
        )
        self.box.start()
        access = Access(local=True)
        settings = FrontSettings(keep_alive_seconds=5.0, max_body_bytes=1 << 20, strict=False)
        sessions = Sessions(self.box.daemon, access, Admission(self.box.daemon, access), settings)
        self.sent_bytes = 0
        self.session = sessions.open(self._send)
        self.session.received(Hello(version=VERSION, pid=1))
        self.session.received(Ready())
        for number in range(streams):
            self._ask(number, names[number % models])

    def _send(self, frame: Any) -> None:
        self.sent_bytes += len(framing.encode(frame))

    def _ask(self, number: int, model: str) -> None:
        name = f"chatcmpl-{number:032x}"
        self.box.world.lives[name] = Life(model, PROMPT_TOKENS, OUTPUT_TOKENS, OUTPUT_TOKENS)
        enter = Enter(
            call=number,
            method="POST",
            path="/v1/chat/completions",
            client="127.0.0.1",
            headers=(),
            connection=number,
        )
        submit = Submit(
            call=number,
            request=name,
            model=model,
            prompt=tuple(range(PROMPT_TOKENS)),
            max_tokens=OUTPUT_TOKENS,
            body=b"",
        )
        self.session.received(enter)
        self.session.received(submit)

    async def forward(self) -> tuple[int, float]:
        """Until all streams are over: how many tokens, and seconds of the processor."""
        tokens, seconds = 0, 0.0
        decoders = {number: frames.decoder_of_reports() for number in self.box.workers}
        while True:
            steps: list[tuple[int, bytes]] = []
            others: list[tuple[int, frames.Up]] = []
            for number, worker in self.box.workers.items():
                assert worker.double is not None
                if worker.double.busy:
                    self.box.now += 0.001
                    for message in worker.work():
                        if isinstance(message, frames.Tokens):
                            steps.append((number, framing.encode(message)))
                            tokens += len(message.produced)
                        else:
                            others.append((number, message))
            if not steps and not others:
                return tokens, seconds
            began = time.thread_time()
            for number, frame in steps:
                for heard in decoders[number].feed(frame):
                    self.box.workers[number]._on_message(heard)
            await asyncio.sleep(0)  # what is new leaves with the turn of the loop
            seconds += time.thread_time() - began
            for number, message in others:
                self.box.workers[number].deliver(message)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all rounds, each with a core of its own."""
    rates = []
    for number in range(arguments.rounds + 1):
        core = Forwarding(arguments.models, arguments.streams)
        tokens, seconds = await core.forward()
        assert tokens == arguments.streams * OUTPUT_TOKENS, tokens
        if number:  # the first one warms up
            rates.append(tokens / seconds)
            print(f"{tokens} tokens, {tokens / seconds:,.0f} per second of the processor")
    return {
        "streams": arguments.streams,
        "models": arguments.models,
        "tokens_per_processor_second": round(statistics.median(rates)),
        "each": [round(rate) for rate in rates],
        "made": made_on_cpu(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--models", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
