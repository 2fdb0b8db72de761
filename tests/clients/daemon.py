"""The daemon that clients ask: `python -m tests.clients.daemon FOLDER`, in the appliance's own
environment. It writes its address, and ends when its input does."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.numpy import load_file, save_file

from appliance.config.loader import load_config
from appliance.demo.checkpoints import make_checkpoints
from appliance.demo.recipes import EOS_ID
from appliance.demo.run import free_port, running_daemon
from tests.parrot import make_parrot

CONTEXT_TOKENS = 32768
"""Agents begin with thousands of tokens of instructions, and this tokenizer's tokens are short."""

CONFIGURATION = """
[api]
bind = "127.0.0.1:{port}"
admin_socket = ""

[devices]
kind = "cpu"
instances = 1
memory = "1GiB"
slab = "512KiB"
host_cache = "512MiB"

[batches]
directory = "batches"

[[model]]  # thinks, answers and calls what `tests.parrot` says
name = "small"
path = "small"
max_context = {context}
dtype = "float32"
tool_parser = "hermes"
reasoning_parser = "qwen3"

[[model]]  # of random weights; it never ends by itself
name = "wordy"
path = "wordy"
max_context = 2048
dtype = "float32"
tool_parser = "hermes"

[[model]]
name = "embedder"
path = "qwen3-a"
max_context = 2048
dtype = "float32"
task = "embed"
"""


def main(folder: Path) -> None:
    make_checkpoints(folder, ["llama-a", "qwen3-a"])
    make_parrot(folder / "llama-a", folder / "small", calls_twice=True)
    _lengthen(folder / "small")
    shutil.copytree(folder / "qwen3-a", folder / "wordy")
    _silence_end(folder / "wordy")
    file = folder / "appliance.toml"
    file.write_text(CONFIGURATION.format(port=free_port(), context=CONTEXT_TOKENS))
    with running_daemon(file, load_config(file)) as (url, _):
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        sys.stdin.read()


def _lengthen(checkpoint: Path) -> None:
    """Attention adds nothing to what this model says, so any position will do."""
    for name, field in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        path = checkpoint / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: CONTEXT_TOKENS}))


def _silence_end(checkpoint: Path) -> None:
    """The end is never the likeliest token, unless a schema allows no other."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][EOS_ID] = 0
    save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
