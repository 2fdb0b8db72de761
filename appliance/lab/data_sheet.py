"""Profiles of models that were never measured, from sizes and data sheets: estimates.

A step reads all weights at a share of the rate of the GPU's memory, a prompt computes at a share of
its peak. The shares are the medians over what was measured of one GPU (``profiles.csv``, 25 pairs
of a model and a GPU); single pairs are off by up to twice. Of a mixture of experts each step reads
all experts, as it does for large batches: small ones are faster than that.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import Final

from appliance.errors import LabError
from appliance.lab.hardware import GpuSpec, ModelProfile
from appliance.vocabulary import Word

MEMORY_SHARE: Final = 0.54
COMPUTE_SHARE: Final = 0.67
KV_SHARE: Final = 0.57
SEQUENCE_FACTOR: Final = 2.9
"""A sequence of a step takes as many times as long as its products at the peak."""
ATTENTION_FACTOR: Final = 3.6
"""The same of the attention of a prompt."""


class ModelSizes(Word, frozen=True, kw_only=True):
    """What a model's files say."""

    name: str
    weight_bytes: int
    active_parameters: int
    """That a token is computed with: of a mixture of experts, not all."""
    layers: int
    hidden: int
    kv_bytes_per_token: int


def estimated(model: ModelSizes, gpu: GpuSpec, tp: int = 1) -> ModelProfile:
    """The model on `tp` of these GPUs, as if they shared the work without a loss."""
    peak = gpu.bf16_flops * tp
    product = 2 * model.active_parameters / peak
    rate = gpu.memory_bytes_per_second * tp
    step, prompt = model.weight_bytes / (rate * MEMORY_SHARE), product / COMPUTE_SHARE
    return ModelProfile(
        name=model.name,
        weight_bytes=model.weight_bytes,
        layers=model.layers,
        hidden=model.hidden,
        kv_bytes_per_token=model.kv_bytes_per_token,
        tp=tp,
        prefill_base_seconds=step,
        prefill_seconds_per_token=0.0,
        prefill_knee_tokens=int(step / prompt),
        prefill_seconds_per_token_past_knee=prompt,
        prefill_seconds_per_token2=ATTENTION_FACTOR * 2 * model.layers * model.hidden / peak,
        step_base_seconds=step,
        step_seconds_per_kv_token=model.kv_bytes_per_token / (rate * KV_SHARE),
        step_seconds_per_sequence=SEQUENCE_FACTOR * product,
    )


def known_sizes(name: str) -> ModelSizes:
    """Of a model of the built-in table. Raises `LabError` if it is not there."""
    known = _models()
    if name not in known:
        raise LabError(f"the sizes of no model {name!r} are known; there are: {', '.join(known)}")
    return known[name]


@cache
def _models() -> dict[str, ModelSizes]:
    with (files("appliance.lab") / "models.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        row["model"]: ModelSizes(
            name=row["model"],
            **{name: int(row[name]) for name in ModelSizes.__struct_fields__ if name != "name"},
        )
        for row in rows
    }
