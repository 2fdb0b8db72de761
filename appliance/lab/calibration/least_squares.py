"""Fits step times to measured ones: least squares of the relative error, no coefficient negative.

A step never gets faster because there is more to do. The forms are those of
`appliance.scheduling.cost_model.StepTimes`; where their lines bend (knees, tiles) is searched among
the sizes below. Rows that a form was not fitted to say how well it fits: rows are sorted by
size and dealt to `FOLDS` folds in turn, and each row is predicted by a fit to the other folds.
R² is of the seconds themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FOLDS = 5

PROMPT_BENDS_FROM, STEP_BENDS_FROM = 12, 24
"""Rows from which bends are looked for; fewer are fitted by straight lines."""

PROMPT_KNEES = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
"""Tokens."""

STEP_KNEES = (8, 16, 24, 32, 48, 64, 96, 128)
STEP_TILES = (32, 64, 128)
"""Requests. Tiles are the rows that a matrix product computes at once."""

CONTRADICTION = 2.0

ROUNDS = 50
"""Of fitting a curve and lines in turn; by then nothing changes any more."""


@dataclass(frozen=True)
class PromptSamples:
    """Measured prompts: `tokens` of `sequences` computed together, the sum of their lengths'
    squares, and the seconds that took; a column each."""

    tokens: Floats
    squares: Floats
    sequences: Floats
    seconds: Floats


@dataclass(frozen=True)
class Steps:
    """Measured decoding steps: requests, tokens of KV that they have together, and seconds."""

    requests: Floats
    kv_tokens: Floats
    seconds: Floats


@dataclass(frozen=True)
class Fit:
    """Times of a model, and how good they are."""

    coefficients: Mapping[str, float]
    """By field of `appliance.lab.hardware.ModelProfile`."""
    rows: int
    r2: float
    """Of the rows, each predicted by a fit that had not seen it; NaN for fewer than `FOLDS`."""
    relative_error: float
    """Of the same predictions, the median."""
    attainable_r2: float
    """Of the best curve whatever that never falls with the size, fitted to these very rows (plus
    lines in the other columns). No law reaches more: what is left is noise."""


def fit_prefill(prompts: PromptSamples) -> Fit:
    """``a + b t + c t² + d max(0, t - knee)``. A sequence more in the same batch costs something,
    too; a prompt computed alone is one sequence."""
    tokens, ones = prompts.tokens, np.ones_like(prompts.tokens)
    knees = [k for k in PROMPT_KNEES if tokens.min() < k < tokens.max() / 2]
    if len(tokens) < PROMPT_BENDS_FROM or not knees:
        knees = [0]
    designs = np.stack(
        [
            np.stack([ones, tokens, prompts.squares, prompts.sequences, _past(tokens, knee)], 1)
            for knee in knees
        ]
    )
    if np.ptp(prompts.sequences) == 0:
        designs[:, :, 3] = 0  # that is the base
    if knees == [0]:
        designs[:, :, 4] = 0
    order = np.lexsort((prompts.squares, tokens))
    chosen, found = _solve(designs, prompts.seconds, 1 / prompts.seconds)
    base, per_token, per_token2, per_sequence, past = found
    others = np.stack([prompts.squares, prompts.sequences], 1)
    return _fit(
        {
            "prefill_base_seconds": base + per_sequence,
            "prefill_seconds_per_token": per_token,
            "prefill_seconds_per_token2": per_token2,
            "prefill_knee_tokens": knees[chosen] if past else 0,
            "prefill_seconds_per_token_past_knee": past,
        },
        designs,
        np.zeros_like(tokens),
        prompts.seconds,
        order,
        attainable_r2(tokens, others, prompts.seconds),
    )


def fit_steps(
    steps: Steps, least_per_kv_token: float = 0.0, most_per_kv_token: float = math.inf
) -> Fit:
    """``a + b kv + c n + d max(0, n - knee) + e ceil(n / tile)``, with `b` within these bounds,
    whatever few tokens seem to say: they are of the memory's rate."""
    requests, kv, ones = steps.requests, steps.kv_tokens, np.ones_like(steps.requests)
    knees = [k for k in STEP_KNEES if requests.min() < k < requests.max()]
    bends = list(itertools.product(knees, STEP_TILES))
    if len(requests) < STEP_BENDS_FROM or not bends:
        bends = [(0, 1)]
    designs = np.stack(
        [
            np.stack([ones, kv, requests, _past(requests, knee), np.ceil(requests / tile)], 1)
            for knee, tile in bends
        ]
    )
    if bends == [(0, 1)]:
        designs[:, :, 3:] = 0
    slope, order = least_per_kv_token, np.lexsort((kv, requests))
    chosen, found = _solve(designs, steps.seconds - slope * kv, 1 / steps.seconds)
    if slope + found[1] > most_per_kv_token:  # then the best within the bounds is at this one
        slope, designs[:, :, 1] = most_per_kv_token, 0
        chosen, found = _solve(designs, steps.seconds - slope * kv, 1 / steps.seconds)
    base, per_kv_token, per_request, past, per_tile = found
    knee, tile = bends[chosen]
    return _fit(
        {
            "step_base_seconds": base,
            "step_seconds_per_kv_token": per_kv_token + slope,
            "step_seconds_per_sequence": per_request,
            "step_knee_sequences": knee if past else 0,
            "step_seconds_per_sequence_past_knee": past,
            "step_tile_sequences": tile if per_tile else 1,
            "step_seconds_per_tile": per_tile,
        },
        designs,
        slope * kv,
        steps.seconds,
        order,
        attainable_r2(requests, kv[:, None], steps.seconds),
    )


def fit(features: Floats, seconds: Floats) -> tuple[list[float], float]:
    """The best coefficients of the columns of `features`, none negative, and R² of the same rows.
    `seconds` are above 0, and so is some column in every row."""
    _, found = _solve(features[None], seconds, 1 / seconds)
    return [float(value) for value in found], r_squared(seconds, features @ found)


def consistent(sizes: Floats, seconds: Floats) -> NDArray[np.bool_]:
    """Which rows to keep so that none took less than 1/`CONTRADICTION` of what one took that is no
    larger in any column of `sizes`. The row that contradicts most others goes first."""
    smaller = (sizes[:, None, :] <= sizes[None, :, :]).all(axis=2)
    against = smaller & (seconds[:, None] > CONTRADICTION * seconds[None, :])
    kept = np.ones(len(seconds), dtype=bool)
    while against.any():
        worst = int((against.sum(axis=0) + against.sum(axis=1)).argmax())
        kept[worst] = False
        against[worst, :] = against[:, worst] = False
    return kept


def r_squared(seconds: Floats, predicted: Floats) -> float:
    """NaN where there is nothing to explain."""
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return 1 - float(((seconds - predicted) ** 2).sum()) / spread if spread else float("nan")


def attainable_r2(sizes: Floats, others: Floats, seconds: Floats) -> float:
    """R² of the best curve of `sizes` that never falls, with a line in each column of `others`,
    both fitted to these very seconds. The two are fitted in turn."""
    lines = np.zeros_like(seconds)
    curve = np.full_like(seconds, seconds.mean())
    for _ in range(ROUNDS):
        curve = _rising(sizes, seconds - lines)
        lines = others @ np.linalg.lstsq(others, seconds - curve, rcond=None)[0]
    return r_squared(seconds, curve + lines)


def _fit(
    coefficients: Mapping[str, float],
    designs: Floats,
    floor: Floats,
    seconds: Floats,
    order: NDArray[np.intp],
    attainable: float,
) -> Fit:
    """With figures of rows that were held out."""
    r2 = error = float("nan")
    if len(seconds) >= FOLDS:
        predicted = np.empty_like(seconds)
        folds = np.empty(len(seconds), dtype=np.int64)
        folds[order] = np.arange(len(seconds)) % FOLDS
        for fold in range(FOLDS):
            seen = folds != fold
            chosen, found = _solve(designs[:, seen], (seconds - floor)[seen], 1 / seconds[seen])
            predicted[~seen] = designs[chosen][~seen] @ found + floor[~seen]
        r2 = r_squared(seconds, predicted)
        error = float(np.median(np.abs(predicted / seconds - 1)))
    plain = {
        name: int(value) if isinstance(value, int) else float(value)
        for name, value in coefficients.items()
    }
    return Fit(plain, len(seconds), r2, error, attainable)


def _past(sizes: Floats, knee: float) -> Floats:
    return np.maximum(0.0, sizes - knee)


def _solve(designs: Floats, target: Floats, weights: Floats) -> tuple[int, Floats]:
    """Which of the designs (first axis; then rows and columns) explains the target best with
    coefficients that are not negative, and these. Every subset of the columns is tried."""
    weighted = designs * weights[None, :, None]
    aims = target * weights
    scale = np.sqrt((weighted**2).sum(axis=1))
    scale[scale == 0] = 1.0
    weighted = weighted / scale[:, None, :]
    columns = designs.shape[2]
    # Columns of length 1, and a ridge of their rounding: those that say the same can be solved.
    normal = weighted.transpose(0, 2, 1) @ weighted + 1e-10 * np.eye(columns)
    sides = aims @ weighted
    best, chosen, found = np.inf, 0, np.zeros(columns)
    for subset in _subsets(columns):
        some = np.ix_(range(len(designs)), subset, subset)
        solved = np.linalg.solve(normal[some], sides[:, subset, None])[:, :, 0]
        errors = -(solved * sides[:, subset]).sum(axis=1)
        errors[(solved < 0).any(axis=1)] = np.inf
        one = int(errors.argmin())
        if errors[one] < best:
            best, chosen = float(errors[one]), one
            found = np.zeros(columns)
            found[list(subset)] = solved[one]
            found /= scale[one]
    return chosen, found


def _subsets(columns: int) -> Sequence[tuple[int, ...]]:
    return [
        subset
        for size in range(1, columns + 1)
        for subset in itertools.combinations(range(columns), size)
    ]


def _rising(sizes: Floats, values: Floats) -> Floats:
    """The closest curve that never falls with the size, at every row (pool adjacent violators)."""
    _, places = np.unique(sizes, return_inverse=True)
    counts = np.bincount(places).astype(np.float64)
    means = np.bincount(places, values) / counts
    pools: list[tuple[float, float, int]] = []  # mean, rows, sizes
    for mean, count in zip(means, counts, strict=True):
        pool = (float(mean), float(count), 1)
        while pools and pools[-1][0] >= pool[0]:
            last = pools.pop()
            rows = last[1] + pool[1]
            pool = ((last[0] * last[1] + pool[0] * pool[1]) / rows, rows, last[2] + pool[2])
        pools.append(pool)
    curve = np.concatenate([np.full(pool[2], pool[0]) for pool in pools])
    result: Floats = curve[places]
    return result
