"""Random prompts of some models, and what plain vLLM adds to each of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from appliance.demo.recipes import Recipe
from appliance.vocabulary import Task
from benchmarks.endurance.memory.kinds import Served
from benchmarks.endurance.memory.vectors import vectors_of

CONTEXT: Final = 512
LONGEST: Final = 64
"""Tokens of an answer at most."""
MEMBERS: Final = 5
"""Prompts of a family, which share a stem."""
STEM: Final = 20
"""Tokens that tell families apart."""
VOCABULARY: Final = range(6, 2048)

# Six models, four shapes of a block: 256, 320, 288 and 128 KiB.
RECIPES: Final = tuple(
    Recipe(
        name=name,
        family=family,
        layers=4,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seed=70 + seed,
    )
    for seed, (name, family, hidden, intermediate, heads, kv_heads, head_dim) in enumerate(
        (
            ("llama-4x64", "llama", 128, 256, 4, 4, 64),
            ("qwen3-4x64", "qwen3", 128, 320, 4, 4, 64),
            ("llama-10x32", "llama", 120, 256, 10, 10, 32),
            ("llama-3x96", "llama", 144, 288, 3, 3, 96),
            ("qwen2-2x64", "qwen2", 128, 320, 2, 2, 64),
            ("qwen3-1x128", "qwen3", 128, 256, 2, 1, 128),
        )
    )
)


def end_of(path: Path) -> int:
    """The token that ends a model's output."""
    end: int = json.loads((path / "config.json").read_text())["eos_token_id"]
    return end


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, and what plain vLLM adds to it: `LONGEST` tokens, or up to its end token."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    adapter: str = ""
    """The name of the LoRA adapter that it is computed with, if any."""
    vector: tuple[float, ...] = ()
    """What plain vLLM makes of the prompt, if the model embeds."""


def answered(
    models: Sequence[Served], generator: random.Random, families: int
) -> tuple[dict[str, list[Text]], dict[str, int]]:
    """Prompts of every model with their answers; how many were left out.

    Every prompt is asked twice, in other company the second time. Where plain vLLM does not agree
    with itself two tokens are as good as equally likely, and nothing can be compared.
    """
    asked = [
        (model, own)
        for model in models
        for own in ((None, model.adapter) if model.adapter else (None,))
        if model.task is Task.GENERATE
    ]
    prompts = {model.name: _prompts(generator, families) for model in models}
    orders = {name: generator.sample(range(len(p)), len(p)) for name, p in prompts.items()}
    task = {
        "checkpoints": [
            {
                "path": str(model.plain or model.path),
                "dtype": model.dtype,
                "max_context": CONTEXT,
                "adapter": adapter.path if adapter else "",
                "prompts": [
                    {"tokens": prompts[model.name][number], "max_tokens": LONGEST}
                    for number in (*range(len(prompts[model.name])), *orders[model.name])
                ],
            }
            for model, adapter in asked
        ]
    }
    done = subprocess.run(
        [sys.executable, "-m", "appliance.engines.vllm.reference"],
        input=json.dumps(task).encode(),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"plain vLLM failed:\n{done.stderr.decode(errors='replace')[-4000:]}")
    texts: dict[str, list[Text]] = {model.name: [] for model in models}
    dropped = dict.fromkeys(texts, 0)
    for (model, adapter), answered in zip(asked, json.loads(done.stdout), strict=True):
        own = adapter.name if adapter else ""
        answers = [answer["tokens"] for answer in answered]
        count = len(prompts[model.name])
        again = dict(zip(orders[model.name], answers[count:], strict=True))
        found = [
            Text(prompt, tuple(answer), own)
            for number, (prompt, answer) in enumerate(
                zip(prompts[model.name], answers[:count], strict=True)
            )
            if again[number] == answer
        ]
        texts[model.name] += found
        dropped[model.name] += count - len(found)
    for model in models:
        if model.task is Task.EMBED:
            vectors = vectors_of(model.path, CONTEXT, prompts[model.name])
            texts[model.name] = [
                Text(prompt, (), vector=tuple(vector))
                for prompt, vector in zip(prompts[model.name], vectors, strict=True)
            ]
    return texts, dropped


def _prompts(generator: random.Random, families: int) -> list[tuple[int, ...]]:
    """Families of prompts: a stem, and the stem with something behind it."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(families):
        stem = tuple(generator.choices(VOCABULARY, k=generator.randint(STEM, 128)))
        prompts.append(stem)
        for _ in range(MEMBERS - 1):
            prompts.append(stem + tuple(generator.choices(VOCABULARY, k=generator.randint(1, 40))))
    return prompts
