"""Other kinds of model for the random schedule: small checkpoints, and how each is served."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from appliance.checkpoints.adapters import AdapterPlace
from appliance.checkpoints.drafts import Speculation
from appliance.platform.cpus import computes_four_bits
from appliance.vocabulary import Task
from tests.configs import CONFIGS
from tests.engine.quantizing import gptq_config, quantize, to_microscaled
from tests.engine.shrunken import make_shrunken
from tests.lora import make_adapter

PUBLISHED: Final = (
    "deepseek-v2-lite",
    "falcon-h1-1.5b-instruct",
    "gemma-3-1b-it",
    "granite-4.0-h-tiny",
    "mixtral-8x7b-instruct-v0.1",
    "nemotron-h-8b",
)
"""Published models that are made small: compressed KV, states, windows, experts."""
UNEQUAL: Final = "gemma-4-e4b-text"
"""Its layers keep KV of two sizes, and some read that of others."""
ENCODER: Final = "bge-small-en-v1.5"
MICROSCALED: Final = "gpt-oss-20b-bf16"
DRAFTS: Final = Speculation(tokens=6, prompt_lookup_min=1, prompt_lookup_max=4)
_LITTLE: Final = 0.3


@dataclass(frozen=True, slots=True)
class Served:
    """A checkpoint, and how it is served."""

    path: Path
    dtype: str = "float32"
    plain: Path | None = None
    """What plain vLLM is given instead, where it has no kernel for the checkpoint: its products."""
    adapter: AdapterPlace | None = None
    """Every prompt is asked with it and without it."""
    drafts: Speculation | None = None
    task: Task = Task.GENERATE

    @property
    def name(self) -> str:
        return self.path.name


def make_kinds(folder: Path) -> list[Served]:
    """`PUBLISHED`, and others; weights in 4 bits where the CPU computes with them. A model with
    experts is the first: vLLM has none in a process after one without."""
    made = [Served(_make(folder, name, name)) for name in (*PUBLISHED, UNEQUAL)]
    made.append(Served(_make(folder, ENCODER, ENCODER), task=Task.EMBED))
    packed = [_packed(folder)] if computes_four_bits() else []
    return [*made, _microscaled(folder), *packed, _adapted(folder), _drafting(folder)]


def _make(folder: Path, name: str, config: str) -> Path:
    return Path(make_shrunken(folder, name, CONFIGS[config]))


def _microscaled(folder: Path) -> Served:
    """Experts in MXFP4, of which the products are computed with."""
    path = _make(folder, "gpt-oss-mxfp4", MICROSCALED)
    products = folder / "products" / path.name
    shutil.copytree(path, products)
    to_microscaled(str(path), str(products))
    return Served(path, plain=products)


def _packed(folder: Path) -> Served:
    """Weights in 4 bits, which vLLM's kernel computes with as they are."""
    path = _make(folder, "qwen2-gptq-int4", "qwen2.5-7b-instruct")
    quantize(str(path), gptq_config(32))
    return Served(path, "bfloat16")


def _adapted(folder: Path) -> Served:
    """With a LoRA adapter, in one batch with its base."""
    path = _make(folder, "qwen3-adapter", "qwen3-0.6b")
    place = AdapterPlace("tuned", make_adapter(folder / "adapter", str(path)), 0)
    return Served(path, adapter=place)


def _drafting(folder: Path) -> Served:
    """With drafts by n-grams, so that a step gives a request several tokens. Its layers say little,
    so that its output goes in circles, and leaves them again."""
    from safetensors.torch import load_file, save_file

    path = _make(folder, "llama-drafts", "llama-3.2-1b")
    file = path / "model.safetensors"
    tensors = {
        name: values * _LITTLE if ".layers." in name and values.ndim == 2 else values
        for name, values in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return Served(path, drafts=DRAFTS)
