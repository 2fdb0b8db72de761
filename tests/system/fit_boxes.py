"""Configurations for `appliance fit`, of models of all kinds, and their checkpoints on disk."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from appliance.demo.checkpoints import make_checkpoints
from appliance.demo.run import free_port
from appliance.platform.cpus import computes_four_bits
from tests.configs import CONFIGS
from tests.engine.pooled import write_modules
from tests.engine.quantizing import quantize, w8a8_config
from tests.engine.shrunken import make_shrunken

DEMO: Final = (
    "llama-a", "llama-b", "llama-c", "qwen2-a", "qwen2-b", "qwen3-a",
    "mixtral-a", "mistral-a", "granite-h-a", "qwen3-4bit-a",
)  # fmt: skip
"""Made by the demonstration's recipes."""
FOUR_BITS: Final = "qwen3-4bit-a" if computes_four_bits() else "qwen3-a"
LONG, LONG_TOKENS = "qwen2-long", 5120
"""A demo model that reads so many tokens."""
W8A8: Final = "qwen3-8b"
ENCODERS: Final = ("all-minilm-l6-v2", "ms-marco-minilm-l6-v2")
SHRUNKEN: Final = ("gemma-3-1b-it", "deepseek-v2-lite", "qwen3-embedding-0.6b", W8A8, *ENCODERS)
"""Small ones of the architectures of published models."""


class Served(NamedTuple):
    """A model of a configuration: its checkpoint, and further keys of its table."""

    checkpoint: str
    keys: str = 'dtype = "float32"'
    path: str = "/v1/completions"
    """Where it is asked."""


class Box(NamedTuple):
    """A configuration."""

    title: str
    devices: str
    max_context: int
    models: tuple[Served, ...]
    refused: bool = False
    """Whether a model has no room in so little memory."""


SLO: Final = 'slo = { ttft = "60s", tbt = "1ms" }'
"""Prompts are not computed in parts in the steps of others, but before these: then all requests
that have room decode together, however slow the machine is."""
FLOATS: Final = 'dtype = "float32"\n'
BOXES: Final = (
    Box(
        "experts and windows",
        'memory = "48MiB"\nslab = "256KiB"\nhost_cache = "256MiB"',
        2048,
        (
            Served("mixtral-a"),
            Served("mistral-a", f"{FLOATS}max_batch = 20"),
            Served("gemma-3-1b-it", f"{FLOATS}max_batch = 24"),
        ),
    ),
    Box(
        "states",
        'memory = "56MiB"\nslab = "1MiB"\nhost_cache = "256MiB"',
        1024,
        (Served("granite-h-a"), Served("qwen2-b"), Served("llama-c")),
    ),
    Box(
        "4 and 8 bits, small batches",
        'memory = "44MiB"\nslab = "512KiB"\nhost_cache = "256MiB"',
        1024,
        (
            Served(FOUR_BITS, 'dtype = "float16"'),
            Served(W8A8, 'dtype = "bfloat16"\nmax_batch = 5'),
            Served("llama-b", f"{FLOATS}max_batch = 1"),
        ),
    ),
    Box(
        "long requests, auto",
        'memory = "112MiB"\nslab = "2MiB"\nhost_cache = "256MiB"',
        0,
        (
            Served(LONG, f'{FLOATS}max_batch = "auto"'),
            Served("deepseek-v2-lite", f'{FLOATS}max_context = 4096\nmax_batch = "auto"'),
        ),
    ),
    Box(
        "a small host cache",
        'memory = "96MiB"\nslab = "512KiB"\nhost_cache = "72MiB"',
        1024,
        (Served("qwen3-a"), Served("qwen2-a")),
    ),
    Box(
        "pinned, and from disk",
        'memory = "64MiB"\nslab = "512KiB"\nhost_cache = "64MiB"',
        512,
        (
            Served("llama-b", f"{FLOATS}pin = true"),
            Served("qwen2-b", f"{FLOATS}pin = true"),
            Served("llama-a"),
            Served("llama-c"),
            Served("qwen3-a"),
        ),
    ),
    Box(
        "two instances",
        'memory = "48MiB"\ninstances = 2\nslab = "512KiB"\nhost_cache = "256MiB"',
        1024,
        (
            Served("llama-a"),
            Served("qwen2-a"),
            Served("qwen3-a"),
            Served("qwen2-b", f"{FLOATS}instances = [1]"),
        ),
    ),
    Box(
        "encoders",
        'memory = "40MiB"\nslab = "256KiB"\nhost_cache = "128MiB"',
        384,
        (
            Served(ENCODERS[0], path="/v1/embeddings"),
            Served(ENCODERS[1], f"{FLOATS}max_batch = 3", "/classify"),
            Served("qwen3-embedding-0.6b", f'{FLOATS}task = "embed"', "/v1/embeddings"),
            Served("llama-b"),
        ),
    ),
    Box(
        "a model that does not fit",
        'memory = "16MiB"\nslab = "512KiB"\nhost_cache = "128MiB"',
        2048,
        (Served("qwen2-a"), Served("gemma-3-1b-it", f"{FLOATS}max_batch = 10")),
        refused=True,
    ),
)


def make(folder: Path) -> None:
    """All checkpoints."""
    make_checkpoints(folder, DEMO)
    shutil.copytree(folder / "qwen2-a", folder / LONG)
    described = folder / LONG / "config.json"
    longer = json.loads(described.read_text()) | {"max_position_embeddings": LONG_TOKENS}
    described.write_text(json.dumps(longer))
    for name in SHRUNKEN:
        make_shrunken(folder, name, CONFIGS[name])
    quantize(str(folder / W8A8), w8a8_config())
    write_modules(folder / ENCODERS[0], "mean_tokens")


def write(box: Box, checkpoints: Path, folder: Path, memory: str = "") -> Path:
    """The file of a configuration, with a journal; with more `memory`, if some is given."""
    devices = (
        re.sub(r'^memory = ".*"', f'memory = "{memory}"', box.devices) if memory else box.devices
    )
    context = f"max_context = {box.max_context}\n" if box.max_context else ""
    tables = [
        f'[api]\nbind = "127.0.0.1:{free_port()}"\nadmin_socket = ""\n',
        f'[devices]\nkind = "cpu"\n{devices}\n',
        '[journal]\npath = "journal.jsonl"\n',
    ]
    tables += [
        f'[[model]]\nname = "{one.checkpoint}"\npath = "{checkpoints / one.checkpoint}"\n'
        f"{context}{SLO}\n{one.keys}\n"
        for one in box.models
    ]
    file = folder / "appliance.toml"
    file.write_text("\n".join(tables), encoding="utf-8")
    return file
