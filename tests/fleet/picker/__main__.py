"""Envoy and llm-d's picker in front of three boxes: `python -m tests.fleet.picker ENVOY EPP`.

Three real daemons (CPU, six models on each, room for two or three) and a plain box. It prints what
was seen, and its status is 1 if something was not as docs/fleet.md says. It takes some minutes, and
is no part of `make test-fleet`, as the picker is no package.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from appliance.demo.run import free_port
from tests.fleet.boxes import MODELS, BoxProcess
from tests.fleet.dialects import DIALECTS, Outcome, Question, ask, questions
from tests.fleet.picker import passage
from tests.fleet.picker.plain_box import PlainBox
from tests.fleet.picker.stack import Stack, keys_in, running
from tests.patience import PATIENCE_SECONDS, until
from tests.unit.doubles.serving import served

CLIENTS, COUNT = 12, 120
READ_SECONDS = 2.0
"""Twice the picker's interval: it has read what was so before."""
ROUTED = [name for name in DIALECTS if not name.startswith("ollama")]
"""Dialects of which the picker reads the model."""


class Report:
    """What was seen, line by line."""

    def __init__(self) -> None:
        self.wrong = 0

    def check(self, what: str, well: bool, detail: str) -> None:
        self.wrong += not well
        self.say(f"{'ok   ' if well else 'WRONG'} {what}: {detail}")

    def say(self, line: str) -> None:
        print(line, flush=True)


def client(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key}"},
        timeout=PATIENCE_SECONDS,
        limits=httpx.Limits(max_connections=None),
    )


async def resident(stack: Stack) -> dict[str, list[str]]:
    """The boxes on which each model is."""
    found: dict[str, list[str]] = {model: [] for model in MODELS}
    for box in stack.boxes:
        async with client(box.url, stack.observer) as asking:
            for model in (await asking.get("/api/load")).raise_for_status().json()["resident"]:
                found[model].append(box.name)
    return found


def ended(stack: Stack, model: str) -> dict[str, float]:
    return {box.name: box.ended(model) for box in stack.boxes}


async def one_by_one(stack: Stack, front: httpx.AsyncClient, report: Report) -> None:
    """Each model in turn, four rounds, from boxes without models, slowly enough for the picker to
    have read where they are: what is tried is what it does with what it knows."""
    order = random.Random(7)
    warm: list[bool] = []
    for turn in range(4):
        for model in order.sample(MODELS, len(MODELS)):
            await asyncio.sleep(READ_SECONDS)
            where = (await resident(stack))[model]
            before = await asyncio.to_thread(ended, stack, model)
            outcome = await ask(front, Question("chat", model, "Tell me about maps.", 8))
            assert outcome.text is not None, outcome.error
            after = before
            while after == before:
                after = await asyncio.to_thread(ended, stack, model)
            (box,) = [name for name in after if after[name] != before[name]]
            on = " and ".join(where) or "no box"
            report.say(f"      round {turn + 1}, {model}: on {on}; {box} answered")
            if where:
                warm.append(box in where)
    well = len(warm) >= len(MODELS) and all(warm)
    report.check("requests go where their model is", well, f"{sum(warm)} of {len(warm)}")


async def load(
    clients: Sequence[httpx.AsyncClient], asked: Sequence[Question], seed: int
) -> list[Outcome]:
    """Twelve clients, each with its share one after the other, at a client by chance."""
    chance = random.Random(seed)
    to = [chance.choice(clients) for _ in asked]

    async def share(mine: list[tuple[httpx.AsyncClient, Question]]) -> list[Outcome]:
        return [await ask(at, question) for at, question in mine]

    async with asyncio.timeout(PATIENCE_SECONDS):
        shares = [list(zip(to, asked, strict=True))[n::CLIENTS] for n in range(CLIENTS)]
        return [one for part in await asyncio.gather(*map(share, shares)) for one in part]


def loads(stack: Stack) -> float:
    return sum(box.loads() for box in stack.boxes)


async def together(
    stack: Stack, front: httpx.AsyncClient, direct: list[httpx.AsyncClient], report: Report
) -> None:
    """The same load at boxes by chance, then through the picker: the same texts. Loads of weights
    are only told: models of these boxes come and go several times within the picker's second."""
    asked = [q for q in questions(MODELS, 2 * COUNT) if q.dialect in ROUTED][:COUNT]
    texts: dict[str, dict[Question, str | None]] = {}
    counted: dict[str, float] = {}
    for name, clients in {"by chance": direct, "picker": [front]}.items():
        before = await asyncio.to_thread(loads, stack)
        outcomes = await load(clients, asked, 11)
        counted[name] = await asyncio.to_thread(loads, stack) - before
        texts[name] = {outcome.question: outcome.text for outcome in outcomes}
        errors = Counter(outcome.error for outcome in outcomes if outcome.error)
        report.check(f"{COUNT} requests, {name}", not errors, f"errors: {dict(errors)}")
    same = texts["picker"] == texts["by chance"]
    report.check("the same texts", same, f"in {len(ROUTED)} dialects")
    report.say(f"      weights were loaded: {counted}")


async def other_dialects(front: httpx.AsyncClient, report: Report) -> None:
    asked = [q for q in questions(MODELS, 4 * len(DIALECTS)) if q.dialect not in ROUTED]
    outcomes = await load([front], asked, 3)
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    report.check("Ollama's dialects, by load alone", not errors, f"{len(asked)}, {dict(errors)}")


async def leaving(
    stack: Stack, box: BoxProcess, how: str, front: httpx.AsyncClient, report: Report
) -> None:
    """A box goes in the middle: requests that begin once it is out of the file go elsewhere."""
    asked = [q for q in questions(MODELS, 2 * COUNT, salt=len(how)) if q.dialect in ROUTED][:COUNT]
    seen: dict[str, list[Outcome]] = {"before": [], "meanwhile": [], "after": []}
    now = "before"
    due = asyncio.Event()

    async def share(mine: Sequence[Question]) -> None:
        for question in mine:
            into = seen[now]
            into.append(await ask(front, question))
            if sum(map(len, seen.values())) >= COUNT // 4:
                due.set()

    async def go() -> None:
        nonlocal now
        await due.wait()
        await asyncio.to_thread(box.drain if how == "drained" else box.kill)
        now = "meanwhile"
        await asyncio.to_thread(until, lambda: box.name not in stack.listed())
        now = "after"

    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(go(), *(share(asked[n::CLIENTS]) for n in range(CLIENTS)))
    for when, outcomes in seen.items():
        errors = Counter(outcome.error[:160] for outcome in outcomes if outcome.error)
        report.say(f"      box {box.name} {how}, begun {when}: {len(outcomes)}, {dict(errors)}")
    lost = [outcome for outcome in seen["after"] if outcome.error]
    report.check(f"after a box was {how}", bool(seen["after"]) and not lost, f"{len(lost)} lost")


async def answers(stack: Stack, front: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    """Wait until Envoy, the picker and a box answer."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            stack.check()
            with suppress(httpx.TransportError):
                if (await front.post(path, json=body)).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def main(envoy: Path, epp: Path, folder: Path) -> int:
    report = Report()
    keys = folder / "keys.json"
    key, observer = keys_in(keys)
    # The loads in docs/fleet.md were counted so.
    boxes = [
        BoxProcess(name, free_port(), folder / name, MODELS, keys, short_turns=True)
        for name in "abc"
    ]
    plain, other = PlainBox(), PlainBox()
    stack = Stack(folder, envoy, epp, boxes, observer)
    async with AsyncExitStack() as exits:
        plain_port = await exits.enter_async_context(served(plain))
        address = f"127.0.0.1:{await exits.enter_async_context(served(other))}"
        # In a thread: the plain box answers meanwhile.
        context = running(stack)
        await asyncio.to_thread(context.__enter__)
        exits.push_async_callback(asyncio.to_thread, context.__exit__, None, None, None)
        await asyncio.to_thread(stack.poll, [f"plain=http://127.0.0.1:{plain_port}"])
        stack.pick()
        stack.front()
        front = await exits.enter_async_context(client(stack.url, key))
        direct = [await exits.enter_async_context(client(box.url, key)) for box in boxes]

        await answers(stack, front, passage.CHAT, passage.body(passage.CHAT))
        report.say(f"boxes in the file: {', '.join(stack.listed())}")
        await passage.scrapes(plain, report.check)
        hits = await passage.by_path(front, plain)
        for path, count in hits.items():
            report.say(f"      {path}: {count} of {passage.TIMES} went where the model is")
        expected = [path for path in hits if path.startswith("/v1/")]
        well = all(hits[path] == passage.TIMES for path in expected)
        report.check("paths that are routed by residency", well, ", ".join(expected))
        await passage.headers(front, report.check)
        await passage.stream(front, plain, report.check)
        await passage.silence(front, report.check)
        await passage.large(front, report.check)
        await passage.steered(front, address, report.check, lambda: other.reached)
        await passage.many(front, plain, report.check)

        # The plain box has other models; all boxes of a file are to have the same ones.
        stack.finish("endpoints")
        await asyncio.to_thread(stack.poll, [])
        first = passage.body(passage.CHAT) | {"model": MODELS[0], "max_tokens": 8}
        async with httpx.AsyncClient(base_url=stack.url) as stranger:
            answer = await stranger.post(passage.CHAT, json=first)
        report.check("without a key a box refuses", answer.status_code == 401, answer.text[:80])
        await one_by_one(stack, front, report)
        await together(stack, front, direct, report)
        await other_dialects(front, report)
        await leaving(stack, boxes[1], "drained", front, report)
        await leaving(stack, boxes[2], "killed", front, report)

        stack.finish("picker")
        await passage.without_picker(front, address, lambda: other.reached, report.check)
        stack.pick()
        await answers(stack, front, passage.CHAT, first)
        report.check("the picker came back", True, "requests are answered again")
    report.say(f"{report.wrong} wrong")
    return min(report.wrong, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("envoy", type=Path, help="Envoy's binary")
    parser.add_argument("epp", type=Path, help="the picker's binary")
    parser.add_argument("--folder", type=Path, help="keep models and logs here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        place = given.folder or Path(made)
        place.mkdir(parents=True, exist_ok=True)
        programs = given.envoy.resolve(), given.epp.resolve()
        sys.exit(asyncio.run(main(*programs, place.resolve())))
