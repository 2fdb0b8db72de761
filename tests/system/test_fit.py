"""`appliance fit` says of a real daemon what its engines then report, how many models are in the
pool, and how many requests run at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

from appliance import journal
from appliance.config.fit import fit, requests_at_once
from appliance.config.sizing import kv_shape, least, read_model
from appliance.demo.traffic import ChatRequest, send
from appliance.vocabulary import ModelBuilt, ModelName, RequestArrived, RunTurn
from tests.system.conftest import start

NAMES = ("llama-a", "qwen3-a", "llama-b")
"""Those with the most KV, of which few long requests have room."""
WORDS, TOKENS = 700, 48
"""Of a prompt, and of an answer: as many as an admitted request has room to grow."""
REQUESTS = 12


class Happened(NamedTuple):
    """What a journal tells."""

    built: dict[ModelName, ModelBuilt]
    tokens: dict[ModelName, int]
    """Of the longest request."""
    together: dict[ModelName, int]
    """The most requests in a turn."""
    resident: int
    """The most models in the pool at once."""


def test_what_is_said_happens(checkpoints: Path) -> None:
    """Weights and blocks of each model exactly, models in the pool, requests in one turn."""
    with start(checkpoints, "appliance", 1, NAMES) as appliance:
        config = appliance.config
        for name in NAMES:
            words = " ".join(["sea"] * WORDS)
            chats = [ChatRequest(name, f"{n} {words}", TOKENS, True) for n in range(REQUESTS)]
            answers = asyncio.run(send(appliance.url, chats, lambda _: None))
            assert [answer.error for answer in answers] == [None] * REQUESTS
    happened = read(appliance.journal)
    entries = [read_model(model, config.devices) for model in config.models]
    said = fit(config, entries, 5e9)
    host_kv = said.host_kv_bytes // config.devices.slab_bytes

    for model, entry in zip(config.models, entries, strict=True):
        devices, built = config.devices, happened.built[model.name]
        assert least(entry, 1, devices).weights == built.weight_slabs
        assert kv_shape(entry, model.max_context, devices) == built.kv
        most = requests_at_once(model, entry, devices, happened.tokens[model.name], host_kv)
        assert happened.together[model.name] == most
        assert 1 < most < REQUESTS
    assert happened.resident == said.most_at_once


def read(path: Path) -> Happened:
    """Feed the journal's events to a machine again."""
    setup, entries = journal.read(path)
    machine = setup.machine()
    found = Happened({}, {}, {}, 0)
    for entry in entries:
        machine.handle(entry.event, entry.now)
        if isinstance(entry.event, ModelBuilt):
            found.built[entry.event.model] = entry.event
        elif isinstance(entry.event, RequestArrived):
            request = entry.event.request
            tokens = request.prompt_tokens + request.max_tokens
            found.tokens[request.model] = max(tokens, found.tokens.get(request.model, 0))
        for command in entry.commands:
            if isinstance(command, RunTurn):
                together = max(len(command.requests), found.together.get(command.model, 0))
                found.together[command.model] = together
        engines = machine.instances[0].engines.values()
        resident = sum([engine.on_device for engine in engines])
        found = found._replace(resident=max(resident, found.resident))
    return found
