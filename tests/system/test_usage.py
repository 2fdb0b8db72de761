"""The ledger of usage under kills and restarts: what clients add up themselves, to the token."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import random
import signal
import socket
import subprocess
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import openai
from click.testing import CliRunner

from appliance.cli.main import cli
from appliance.usage.entries import WHOLE, Amounts, Entry
from appliance.usage.ledger import Ledger
from tests.patience import PATIENCE_SECONDS
from tests.system.test_restart import begin_batch, configure, daemon, finished, new_key, until
from tests.unit.doubles.notify import manager

KEYS: Final = 5
CLIENTS: Final = 6
ENDS: Final = ((50, signal.SIGKILL), (100, signal.SIGTERM))
"""After how many whole answers a daemon is ended, and how."""
ENOUGH: Final = 150
"""Whole answers, when all is over."""
MOST_TOKENS: Final = 6

Numbers = tuple[int, int]
"""Input and output tokens, as a client was told."""


class Clients:
    """Each asks one thing after the other, as one of the keys, and adds up what it was told. A
    request has a name of its own, which the ledger knows, too."""

    def __init__(self, url: str, keys: dict[str, str], models: list[str]) -> None:
        self.whole: dict[str, tuple[str, str, Numbers]] = {}
        """Key, model and numbers of each answer that came to its end, by what the ledger calls the
        request (`name_of`)."""
        self.broken: set[str] = set()
        """Requests whose answer did not, for whatever reason, by their names."""
        self.nameless = 0
        """How many of them the ledger calls something else."""
        self.kinds: Counter[str] = Counter()
        self._url = url
        self._keys = keys
        self._models = models
        self._over = False

    async def run(self, number: int) -> None:
        chance = random.Random(number)
        turn = 0
        while not self._over:
            key = chance.choice(sorted(self._keys))
            model = chance.choice(self._models)
            name = f"ask-{number}-{turn}-end"
            kind = KINDS[(number + turn) % len(KINDS)]
            turn += 1
            headers = {"Authorization": f"Bearer {self._keys[key]}", "x-request-id": name}
            first: list[str] = []

            async def note(answer: httpx.Response, first: list[str] = first) -> None:
                first.append(answer.headers.get("x-appliance-request", ""))

            hooks = {"response": [note]}
            client = httpx.AsyncClient(base_url=self._url, headers=headers, event_hooks=hooks)
            try:
                async with client, asyncio.timeout(PATIENCE_SECONDS):
                    numbers = await ASKS[kind](client, model)
            except httpx.TransportError:
                numbers = None
            if numbers is None:
                self.broken.add(name)
                self.nameless += kind in NAMELESS
            else:
                self.whole[name_of(first[0])] = key, model, numbers
                self.kinds[kind] += 1

    async def meanwhile(self, happening: Any) -> None:
        running = [asyncio.create_task(self.run(number)) for number in range(CLIENTS)]
        try:
            await happening
        finally:
            self._over = True
            await asyncio.gather(*running)

    async def until_whole(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self.whole) < count:  # noqa: ASYNC110 - from all sides
                await asyncio.sleep(0.02)

    def sums(self) -> dict[tuple[str, str], Amounts]:
        found: dict[tuple[str, str], Amounts] = defaultdict(Amounts)
        for key, model, (given, said) in self.whole.values():
            found[key, model] += Amounts(requests=1, input_tokens=given, output_tokens=said)
        return dict(found)


def chat(model: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me of the river."}]
    return {"model": model, "messages": messages, "max_tokens": MOST_TOKENS} | more


def of_openai(usage: dict[str, Any]) -> Numbers:
    return usage["prompt_tokens"], usage.get("completion_tokens") or 0


async def asked(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """The answer; None if there is none."""
    answer = await client.post(path, json=body, timeout=PATIENCE_SECONDS)
    return answer.json() if answer.is_success else None


async def whole_chat(client: httpx.AsyncClient, model: str) -> Numbers | None:
    said = await asked(client, "/v1/chat/completions", chat(model))
    return None if said is None else of_openai(said["usage"])


async def choices(client: httpx.AsyncClient, model: str) -> Numbers | None:
    """Three of one prompt, which counts once."""
    said = await asked(client, "/v1/chat/completions", chat(model, n=3, temperature=1.0))
    return None if said is None else of_openai(said["usage"])


async def prompts(client: httpx.AsyncClient, model: str) -> Numbers | None:
    """Two in one request."""
    body = {"model": model, "prompt": ["The river", "Old bridges are"], "max_tokens": MOST_TOKENS}
    said = await asked(client, "/v1/completions", body)
    return None if said is None else of_openai(said["usage"])


async def stop_string(client: httpx.AsyncClient, model: str) -> Numbers | None:
    """Ends at the first space, or "e", wherever that is: more may be computed than the client is
    sent."""
    body = {"model": model, "prompt": "The river", "max_tokens": 40, "stop": [" ", "e"]}
    said = await asked(client, "/v1/completions", body | {"ignore_eos": True})
    return None if said is None else of_openai(said["usage"])


async def streamed(client: httpx.AsyncClient, model: str) -> Numbers | None:
    """Whole once its last event has come."""
    body = chat(model, stream=True, stream_options={"include_usage": True}, stop=["e"])
    numbers, ended = None, False
    async with client.stream(
        "POST", "/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS
    ) as answer:
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: ") and (usage := json.loads(line[6:]).get("usage")):
                numbers = of_openai(usage)
    return numbers if ended else None


async def left(client: httpx.AsyncClient, model: str) -> Numbers | None:
    """The client leaves after the first piece of a stream."""
    body = chat(model, stream=True, max_tokens=200, ignore_eos=True)
    async with client.stream(
        "POST", "/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS
    ) as answer:
        async for _ in answer.aiter_lines():
            break
    return None


async def of_anthropic(client: httpx.AsyncClient, model: str) -> Numbers | None:
    said = await asked(client, "/v1/messages", chat(model))
    if said is None:
        return None
    usage = said["usage"]
    cached = (usage.get("cache_read_input_tokens") or 0) + (
        usage.get("cache_creation_input_tokens") or 0
    )
    return usage["input_tokens"] + cached, usage["output_tokens"]


async def of_ollama(client: httpx.AsyncClient, model: str) -> Numbers | None:
    """A stream of lines, of which the last one says it."""
    body = {"model": model, "prompt": "The river", "options": {"num_predict": MOST_TOKENS}}
    last: dict[str, Any] = {}
    async with client.stream("POST", "/api/generate", json=body, timeout=PATIENCE_SECONDS) as said:
        async for line in said.aiter_lines():
            last = json.loads(line)
    return (last["prompt_eval_count"], last["eval_count"]) if last.get("done") else None


async def of_responses(client: httpx.AsyncClient, model: str) -> Numbers | None:
    body = {"model": model, "input": "Tell me of the river.", "max_output_tokens": MOST_TOKENS}
    said = await asked(client, "/v1/responses", body)
    return None if said is None else (said["usage"]["input_tokens"], said["usage"]["output_tokens"])


async def wrong(client: httpx.AsyncClient, model: str) -> Numbers | None:
    """Refused before anything is computed."""
    assert await asked(client, "/v1/chat/completions", chat(model, temperature=9.0)) is None
    return None


ASKS: Final = {
    ask.__name__: ask
    for ask in (
        whole_chat, choices, prompts, stop_string, streamed, left, of_anthropic, of_ollama,
        of_responses, wrong,
    )
}  # fmt: skip
KINDS: Final = sorted(ASKS)
NAMELESS: Final = ("of_anthropic", "of_ollama", "of_responses")
"""The ids of their requests do not show what the client called them."""


def test_the_ledger_is_what_clients_add_up(checkpoints: Path, tmp_path: Path) -> None:
    """Some hundred requests of five keys in every dialect, streamed and not, with stop strings,
    several choices, clients that leave, and a batch. A daemon is killed and one is told to end
    meanwhile. Of every answer that a client had whole, the ledger has the client's own numbers,
    once; and it has nothing else, but what clients saw break off."""
    keys, folder, books = tmp_path / "keys.json", tmp_path / "batches", tmp_path / "usage"
    file = configure(checkpoints, keys, folder)
    file.write_text(file.read_text() + f"[usage]\ndirectory = {str(books)!r}\n")
    models = sorted(path.name for path in checkpoints.iterdir() if path.is_dir())[:2]
    secrets = {f"key-{number}": new_key(keys, f"key-{number}") for number in range(KEYS)}
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener, manager(tmp_path) as told:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        clients = Clients(url, secrets, models)
        with (
            ExitStack() as daemons,
            openai.OpenAI(base_url=f"{url}/v1", api_key=new_key(keys, "nightly")) as nightly,
        ):

            def start(number: int) -> subprocess.Popen[bytes]:
                log = tmp_path / f"{number}.log"
                return daemons.enter_context(daemon(file, listener, told, log))

            running = start(0)
            until(lambda: any("READY" in message for message in told.heard()))
            batch = begin_batch(nightly, models[0])

            async def kills() -> None:
                process = running
                for number, (count, end) in enumerate(ENDS, 1):
                    await clients.until_whole(count)
                    process.send_signal(end)
                    await asyncio.to_thread(process.wait, PATIENCE_SECONDS)
                    process = start(number)
                await clients.until_whole(ENOUGH)

            asyncio.run(clients.meanwhile(kills()))
            (used, _), _ = finished(nightly, batch)
            shown = by_admin(url, new_key(keys, "admin", "--scope", "admin"))

    assert set(clients.kinds) == set(KINDS) - {"left", "wrong"}
    ledger = Ledger(books, keep_months=13, max_rows=10_000, now=lambda: 0.0)
    ledger.open()
    entries = list(ledger.books.recent())
    rows = list(ledger.books.rows())
    asyncio.run(ledger.aclose())

    of_name: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        of_name[name_of(entry.request)].append(entry)
    for name, (key, model, numbers) in clients.whole.items():
        found = of_name[name]
        sums = sum_of(found)
        assert (sums.input_tokens, sums.output_tokens) == numbers, (name, found)
        assert sums.requests == 1
        assert {(one.key, one.model, one.outcome) for one in found} == {(key, model, WHOLE)}
    others = {name for name in of_name if name and name not in clients.whole}
    known = {name for name in others if name.startswith("ask-")}
    assert known <= clients.broken
    assert len(others) - len(known) <= clients.nameless

    expected = clients.sums()
    for name in others:  # what a daemon had written down just before it was killed, or ended early
        for one in of_name[name]:
            if one.outcome == WHOLE:
                at = one.key, one.model
                expected[at] = expected.get(at, Amounts()) + one.amounts
    found_sums: dict[tuple[str, str], Amounts] = defaultdict(Amounts)
    for cell, amounts in rows:
        if cell.outcome == WHOLE and cell.key != "nightly":
            found_sums[cell.key, cell.model] += amounts
    assert counts(found_sums) == counts(expected)

    nightly_sums = Amounts()
    for cell, sums in rows:  # two at midnight
        if (cell.key, cell.outcome) == ("nightly", WHOLE):
            nightly_sums += sums
    assert (nightly_sums.input_tokens, nightly_sums.output_tokens) == (
        used.input_tokens,
        used.output_tokens,
    )
    assert {one.outcome for name in others for one in of_name[name]} >= {"cut"}
    assert all(sums.device_microseconds > 0 for _, sums in rows if sums.output_tokens)
    whole: dict[tuple[str, str, str], Amounts] = defaultdict(Amounts)
    for cell, sums in rows:
        if cell.outcome == WHOLE:
            whole[cell.key, cell.model, cell.outcome] += sums
    assert {cell: numbers for cell, numbers in shown.items() if cell[2] == WHOLE} == {
        cell: (sums.requests, sums.input_tokens, sums.output_tokens) for cell, sums in whole.items()
    }


def by_admin(url: str, secret: str) -> dict[tuple[str, str, str], tuple[int, int, int]]:
    """What the command line shows."""
    line = ["usage", "--by", "key,model,outcome", "--since", "1d", "--csv", "--url", url]
    result = CliRunner().invoke(cli, line, env={"APPLIANCE_API_KEY": secret})
    assert result.exit_code == 0, result.output
    return {
        (row["key"], row["model"], row["outcome"]): (
            int(row["requests"]), int(row["input_tokens"]), int(row["output_tokens"])
        )
        for row in csv.DictReader(io.StringIO(result.stdout))
    }  # fmt: skip


def name_of(request: str) -> str:
    """What the client called a request, if that is in the id; else the id itself."""
    _, found, rest = request.partition("ask-")
    return f"ask-{rest.partition('-end')[0]}-end" if found else request


def sum_of(entries: list[Entry]) -> Amounts:
    sums = Amounts()
    for entry in entries:
        sums += entry.amounts
    return sums


def counts(sums: dict[tuple[str, str], Amounts]) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {
        at: (one.requests, one.input_tokens, one.output_tokens) for at, one in sums.items() if one
    }
