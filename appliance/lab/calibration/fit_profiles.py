"""A cost model from measured steps: fits for every model and GPU, how good they are, and the range
that they hold for.

A fit is asked to explain rows that it has not seen (`least_squares`). Rows that no box can
show are left out: weights and KV beyond the GPUs' memory, or, in a table of repeated steps, less
than half of the time that less work took. What a daemon recorded is single steps on a machine with
other things to do: all of them count.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from appliance.errors import LabError
from appliance.lab.calibration.least_squares import (
    Fit,
    Floats,
    PromptSamples,
    Steps,
    consistent,
    fit_prefill,
    fit_steps,
    r_squared,
)
from appliance.lab.calibration.step_tables import Measurements, MixedStep, TableKey
from appliance.lab.hardware import GpuSpec, Measured, ModelProfile, gpu, profile, profiled
from appliance.vocabulary import Word

PREFILL_R2, STEP_R2 = 0.97, 0.95
"""What a cost model must explain of rows that were held out."""

RECORDED = "recorded"
"""The GPU of what a daemon recorded."""

LEAST_ROWS = 8
"""Fewer are not fitted."""

LEAST_MEMORY_SHARE = 0.5
"""Of its memory's rate, what a GPU reaches at least where it reads KV. The published steps read
some thousand tokens of KV at most, which takes less time than the rest of the step varies by: a fit
to these alone finds anything from no time at all to that of a tenth of the rate."""


class Sizes(Word, frozen=True, kw_only=True):
    """What a profile says of a model besides times."""

    weight_bytes: int
    layers: int
    hidden: int
    kv_bytes_per_token: int


class Range(Word, frozen=True):
    """Of a size, over the rows of a fit."""

    least: int
    most: int


class Quality(Word, frozen=True, kw_only=True):
    """A fit, and how far it is to be trusted."""

    coefficients: Mapping[str, float]
    rows: int
    left_out: int
    """Rows that do not fit in the memory, or that most others contradict."""
    held_out: int
    """Rows that were predicted by fits to others: all, or none where they are too few."""
    r2: float
    relative_error: float
    """Median, of rows held out."""
    attainable_r2: float
    """Of a curve that rises with the size and a line in KV, fitted to these very rows: where that
    is low, rows contradict each other."""
    ranges: Mapping[str, Range]


class Calibrated(Word, frozen=True, kw_only=True):
    """The cost model of one key."""

    source: str
    model: str
    gpu: str
    tp: int
    sizes: Sizes | None
    """None if they are not known: it can be no profile then."""
    prefill: Quality | None
    """None without rows."""
    step: Quality | None
    mixed_rows: int = 0
    mixed_r2: float = math.nan
    """Of mixed steps, which nothing was fitted to."""

    def misses(self, prefill_r2: float, step_r2: float) -> list[str]:
        """The bounds that it does not reach."""
        return [
            name
            for name, found, bound in [
                ("prefill", self.prefill, prefill_r2),
                ("step", self.step, step_r2),
            ]
            if found is not None and not found.r2 >= bound
        ]

    def profile(self) -> ModelProfile | None:
        """It, if both kinds of times and the sizes are known."""
        if self.sizes is None or self.prefill is None or self.step is None:
            return None
        made = {
            **msgspec.to_builtins(self.sizes),
            **self.prefill.coefficients,
            **self.step.coefficients,
            "name": self.model,
            "tp": self.tp,
            "measured": Measured(
                prompt_tokens=self.prefill.ranges["tokens"].most,
                requests=self.step.ranges["requests"].most,
                kv_tokens=self.step.ranges["kv_tokens"].most,
            ),
        }
        return msgspec.convert(made, ModelProfile)


def calibrate(
    measured: Mapping[TableKey, Measurements], sizes: Mapping[str, Sizes]
) -> list[Calibrated]:
    """Fits for every key, in order. `sizes` by model; a model's name in a table may differ from
    it in case and punctuation."""
    by_letters = {_letters(name): name for name in sizes}
    return [
        _calibrated(key, rows, by_letters.get(_letters(key.model), key.model), sizes)
        for key, rows in measured.items()
    ]


def _calibrated(
    key: TableKey, rows: Measurements, model: str, sizes: Mapping[str, Sizes]
) -> Calibrated:
    hardware, known = _gpu(key.gpu), sizes.get(model)
    prefill = step = None
    prompts, steps = rows.prompt_columns(), rows.step_columns()
    kept = _kept(key, np.stack([prompts.tokens, prompts.squares], 1), prompts.seconds)
    left_out = int((~kept).sum())
    prompts = PromptSamples(*(column[kept] for column in _columns(prompts)))
    if len(prompts.tokens) >= LEAST_ROWS:
        ranges = {"tokens": prompts.tokens, "sequences": prompts.sequences}
        prefill = _quality(fit_prefill(prompts), left_out, ranges)
    kept = _kept(key, np.stack([steps.requests, steps.kv_tokens], 1), steps.seconds)
    kept &= _possible(steps, hardware, key.tp, known)
    left_out = int((~kept).sum())
    steps = Steps(*(column[kept] for column in _columns(steps)))
    if len(steps.requests) >= LEAST_ROWS:
        least, most = _kv_bounds(hardware, key.tp, known)
        ranges = {"requests": steps.requests, "kv_tokens": steps.kv_tokens}
        step = _quality(fit_steps(steps, least, most), left_out, ranges)
    found = Calibrated(
        source=key.source,
        model=model,
        gpu=hardware.name if hardware else key.gpu,
        tp=key.tp,
        sizes=known,
        prefill=prefill,
        step=step,
    )
    made = found.profile()
    if made is None or not rows.mixed:
        return found
    return msgspec.structs.replace(
        found, mixed_rows=len(rows.mixed), mixed_r2=_mixed_r2(made, rows.mixed)
    )


def _kv_bounds(hardware: GpuSpec | None, tp: int, sizes: Sizes | None) -> tuple[float, float]:
    """The least and the most seconds that reading a token of KV may take."""
    if hardware is None or sizes is None:
        return 0.0, math.inf
    least = sizes.kv_bytes_per_token / (hardware.memory_bytes_per_second * tp)
    return least, least / LEAST_MEMORY_SHARE


def _kept(key: TableKey, sizes: Floats, seconds: Floats) -> NDArray[np.bool_]:
    if key.gpu == RECORDED:
        return np.ones(len(seconds), dtype=bool)
    return consistent(sizes, seconds)


def _columns(rows: PromptSamples | Steps) -> list[Floats]:
    return [getattr(rows, field.name) for field in fields(rows)]


def _quality(fit: Fit, left_out: int, ranges: Mapping[str, Floats]) -> Quality:
    return Quality(
        coefficients=fit.coefficients,
        rows=fit.rows,
        left_out=left_out,
        held_out=0 if math.isnan(fit.r2) else fit.rows,
        r2=fit.r2,
        relative_error=fit.relative_error,
        attainable_r2=fit.attainable_r2,
        ranges={name: Range(int(of.min()), int(of.max())) for name, of in ranges.items()},
    )


def _possible(steps: Steps, hardware: GpuSpec | None, tp: int, sizes: Sizes | None) -> np.ndarray:
    """Rows whose weights and KV fit in the memory."""
    if hardware is None or sizes is None:
        return np.ones(len(steps.requests), dtype=bool)
    needed = sizes.weight_bytes + sizes.kv_bytes_per_token * steps.kv_tokens
    return np.asarray(needed <= hardware.vram_bytes * tp)


def _mixed_r2(made: ModelProfile, mixed: Sequence[MixedStep]) -> float:
    predicted = [
        made.mixed_step_seconds(
            row.requests, row.kv_tokens, [(row.chunk_tokens, row.chunk_history)]
        )
        for row in mixed
        if row.chunk_tokens
    ]
    seconds = [row.seconds for row in mixed if row.chunk_tokens]
    return r_squared(np.array(seconds), np.array(predicted))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _gpu(name: str) -> GpuSpec | None:
    """``A100``, ``a100-80gb`` …"""
    try:
        return gpu(name.partition("-")[0].upper())
    except LabError:
        return None


def known_sizes() -> dict[str, Sizes]:
    """Of the models that the built-in table has."""
    return {model: sizes_of(profile(model, gpu_name, tp)) for model, gpu_name, tp in profiled()}


def sizes_of(known: ModelProfile) -> Sizes:
    return msgspec.convert(known, Sizes, from_attributes=True)


def read_sizes(path: Path) -> dict[str, Sizes]:
    """A table of models: ``model``, ``layers``, ``hidden``, ``kv_bytes_per_token_16bit``, and
    ``params_computed`` (of two bytes each). Raises `LabError`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return {
                row["model"]: Sizes(
                    weight_bytes=2 * int(row["params_computed"]),
                    layers=int(row["layers"]),
                    hidden=int(row["hidden"]),
                    kv_bytes_per_token=int(row["kv_bytes_per_token_16bit"]),
                )
                for row in csv.DictReader(file)
            }
    except (OSError, UnicodeDecodeError, KeyError, ValueError) as error:
        raise LabError(f"{path}: not a table of models: {error!r}") from None


def profile_table(found: Iterable[Calibrated]) -> str:
    """The profiles as CSV, as the built-in table is. Of several sources for the same model, GPU
    and tp the first counts."""
    times = [
        name for name in ModelProfile.__struct_fields__ if name.startswith(("prefill_", "step_"))
    ]
    columns = [
        *("model", "gpu", "tp", "source", *Sizes.__struct_fields__, *times),
        *(*Measured.__struct_fields__, "prefill_r2", "step_r2"),
    ]
    written: dict[tuple[str, str, int], list[object]] = {}
    for one in found:
        made = one.profile()
        if made is None or made.measured is None or (one.model, one.gpu, one.tp) in written:
            continue
        assert one.prefill is not None, "it is a profile"
        assert one.step is not None, "it is a profile"
        written[one.model, one.gpu, one.tp] = [
            *(one.model, one.gpu, one.tp, one.source),
            *(getattr(made, name) for name in Sizes.__struct_fields__),
            *(f"{getattr(made, name):.6g}" for name in times),
            *(getattr(made.measured, name) for name in Measured.__struct_fields__),
            *(f"{one.prefill.r2:.4f}", f"{one.step.r2:.4f}"),
        ]
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(columns)
    lines.writerows(written[key] for key in sorted(written))
    return text.getvalue()
