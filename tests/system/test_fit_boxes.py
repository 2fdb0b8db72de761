"""Nine configurations more for which a real daemon does what `appliance fit` says: models that are
in memory at once exactly, and requests that are computed at once.

Not among the tests of `make test`: `make test-fit` runs them with the first one (test_fit.py), and
prints the table of docs/sizing.md.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import msgspec
import pytest
from click.testing import CliRunner

from appliance import journal
from appliance.cli.main import cli
from appliance.config.fit import Fit, ModelFit, short
from appliance.config.loader import load_config
from appliance.config.schema import Config
from appliance.demo.run import running_daemon
from appliance.platform.children import module_command
from appliance.units import Memory
from appliance.vocabulary import (
    InstanceId,
    ModelBuilt,
    ModelName,
    RequestArrived,
    RequestId,
    RequestSpec,
    RunPrefill,
    RunTurn,
    TokensProduced,
    TurnEnded,
)
from tests.patience import PATIENCE_SECONDS
from tests.system.conftest import until
from tests.system.fit_boxes import BOXES, Box, make, write

OUTPUT: Final = 48
"""Tokens of an answer: its request is at its longest while the others are there."""
MORE: Final = 3
"""So many requests more are sent than are said to be computed at once."""
WORDS: Final = range(300, 1900)
"""Tokens of prompts, which every vocabulary has, and which are none with a meaning of their own."""

GENERATES: Final = "/v1/completions"

Key = tuple[ModelName, int]
"""Requests of a model, of so many tokens with their answers."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitting")
    make(folder)
    return folder


@pytest.mark.parametrize("box", BOXES, ids=lambda box: box.title.replace(" ", "-"))
def test_what_is_said_happens(box: Box, checkpoints: Path, tmp_path: Path) -> None:
    file = write(box, checkpoints, tmp_path)
    if box.refused:
        file = write(box, checkpoints, tmp_path, advised(file))
    found = CliRunner().invoke(cli, ["fit", "--json", str(file)])
    assert found.exit_code == 0, found.output
    said = msgspec.json.decode(found.stdout, type=Fit)
    config = load_config(file)
    with running_daemon(file, config) as (url, _):
        asking = Asking(url, box, said, config)
        memory = asking.memory()
        asking.requests()
    seen = read(tmp_path / "journal.jsonl")

    rows = list(compared(said, config, memory, seen))
    for row in rows:
        print(f"| {box.title} | {' | '.join(map(str, row))} |")  # noqa: T201
    assert [row for row in rows if not row.right] == []


def advised(file: Path) -> str:
    """The `devices.memory` that `fit` and `serve` advise, which refuse the configuration."""
    fit, serve = (
        subprocess.run(
            module_command("appliance", *command), capture_output=True, text=True, check=False
        )
        for command in (("fit", str(file)), ("serve", "--config", str(file)))
    )
    assert (fit.returncode, serve.returncode) == (2, 2)
    assert fit.stderr == serve.stderr
    sizes = re.findall(r"set devices.memory to (\S+) or more", fit.stderr)
    return max(sizes, key=Memory.read)


class Seen(NamedTuple):
    """What a journal tells."""

    peaks: Counter[Key]
    """The most requests of each kind that were computed at once on each instance, added up: those
    that got a token in the same step, or, where they get none, those of the same turn. Instances
    are not looked at together: one may be done before the other has begun."""
    weight_slabs: dict[ModelName, int]
    """Of each model, as its engine reported them."""


class Row(NamedTuple):
    """Of the table."""

    what: str
    said: int
    seen: int
    right: bool


def compared(
    said: Fit, config: Config, memory: tuple[int, int | None], seen: Seen
) -> Iterator[Row]:
    """What was said, and what was seen of it."""
    for what, number, count in zip(
        ("models at once, the smallest", "models at once, the largest"),
        (said.most_at_once, said.fewest_at_once),
        memory,
        strict=True,
    ):
        if count is not None:
            yield Row(what, number, count, number == count)
    for model, one in zip(config.models, said.models, strict=True):
        slabs, own = one.weight_bytes // config.devices.slab_bytes, seen.weight_slabs[one.name]
        # At least: engines pad rows of the wrong length (decision 42).
        yield Row(f"{one.name}: slabs of weights", slabs, own, 0 <= own - slabs <= 0.1 * slabs)
        for tokens, number in sizes(one, short(model)).items():
            most = seen.peaks[one.name, tokens]
            what = f"{one.name}: requests of {tokens:,} tokens"
            yield Row(what, number, most, abs(most - number) <= 0.1 * number)


def sizes(one: ModelFit, short: int) -> dict[int, int]:
    """Tokens of a request, and how many of them are said to be computed at once."""
    return {one.max_context: one.requests_at_max_context, short: one.requests_at_4k}


class Asking:
    """Asks a daemon for what was said of it."""

    def __init__(self, url: str, box: Box, said: Fit, config: Config) -> None:
        self._url = url
        self._said = said
        self._models = {model.name: model for model in config.models}
        self._paths = {one.checkpoint: one.path for one in box.models}
        self._dice = random.Random(1)

    def memory(self) -> tuple[int, int | None]:
        """The most models in one pool, the smallest first, and the largest first, unless there are
        several pools."""
        by_size = sorted(self._said.models, key=lambda one: one.weight_bytes)
        names = [one.name for one in by_size]
        if self._said.instances > 1:  # the daemon chooses in which pool they are
            self._begin(names)
            return max([max(counts) for counts in self._in_turn(names)]), None
        return (
            self._most(names, self._said.most_at_once),
            self._most(names[::-1], self._said.fewest_at_once),
        )

    def _most(self, names: Sequence[ModelName], said: int) -> int:
        """So many of these models, from the first on, stay in the pool while each has a request.
        Numbers that are neither what was said nor the next one are not told apart."""
        stay = 0
        for count in (said, said + 1)[: 1 + len(names) - said]:
            self._begin(names[:count])
            if all(self._in_turn(names[:count]) == [[count]] * count for _ in range(2)):
                stay = count
        return stay

    def requests(self) -> None:
        """As many requests of each model and each size as have room, and more."""
        for one in self._said.models:
            for tokens, number in sizes(one, short(self._models[one.name])).items():
                asyncio.run(self._ask(one.name, tokens, number + MORE))

    def _begin(self, names: Iterable[ModelName]) -> None:
        """Have these models in memory that have room there, and no others."""
        for name in self._models:
            httpx.post(f"{self._url}/api/models/{name}/evict").raise_for_status()
        until(lambda: not any(self._loaded()))
        self._in_turn(names)

    def _in_turn(self, names: Iterable[ModelName]) -> list[list[int]]:
        """Models in each pool, as the daemon says after each of these was asked."""
        counts = []
        for name in names:
            asyncio.run(self._ask(name, short(self._models[name]), 1))
            counts.append(self._loaded())
        return counts

    def _loaded(self) -> list[int]:
        """How many models have their weights in the pool of each instance."""
        status = httpx.get(f"{self._url}/api/status", timeout=PATIENCE_SECONDS).json()
        return [
            sum(
                model["residency"].get(str(instance["instance"])) in ("loading", "loaded")
                for model in status["models"]
            )
            for instance in status["instances"]
        ]

    async def _ask(self, name: ModelName, tokens: int, number: int) -> None:
        """Requests of so many tokens at once, `OUTPUT` of which are their answers, if they have
        some."""
        path = self._paths[name]

        async def one(client: httpx.AsyncClient) -> None:
            prompt = self._dice.choices(WORDS, k=tokens)
            body: dict[str, Any] = {"model": name, "input": prompt}
            if path == GENERATES:
                body = {"model": name, "prompt": prompt[OUTPUT:], "max_tokens": OUTPUT}
                body["ignore_eos"] = True
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=PATIENCE_SECONDS, limits=limits
        ) as client:
            await asyncio.gather(*(one(client) for _ in range(number)))


def read(path: Path) -> Seen:
    _, entries = journal.read(path)
    requests: dict[RequestId, RequestSpec] = {}
    turns: dict[InstanceId, RunTurn] = {}
    peaks: dict[InstanceId, Counter[Key]] = {}
    weight_slabs: dict[ModelName, int] = {}

    def note(instance: InstanceId, names: Iterable[RequestId]) -> None:
        found = [requests[name] for name in names]
        counts = Counter((one.model, one.prompt_tokens + one.max_tokens) for one in found)
        peaks[instance] = peaks.get(instance, Counter()) | counts

    for entry in entries:
        match entry.event:
            case RequestArrived(request=request):
                requests[request.id] = request
            case TokensProduced(instance=number, tokens=tokens) if number in turns:
                got = {one.request for one in tokens}
                note(number, got & set(turns[number].requests))
            case ModelBuilt():
                weight_slabs[entry.event.model] = entry.event.weight_slabs
            case TurnEnded(instance=number):
                turns.pop(number, None)
        for command in entry.commands:
            match command:
                case RunTurn(instance=number):
                    turns[number] = command
                    prompts = command.prompts
                case RunPrefill(instance=number):
                    prompts = (command.request,)
                case _:
                    continue
            note(number, [name for name in prompts if not requests[name].max_tokens])
    return Seen(sum(peaks.values(), Counter()), weight_slabs)
