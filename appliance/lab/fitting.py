"""Fits step times to measured ones: least squares of the relative error, no coefficient negative.

A step never gets faster because there is more to do. R² is of the seconds themselves.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def fit(features: Floats, seconds: Floats) -> tuple[list[float], float]:
    """The best coefficients of the columns of `features`, none negative, and R². `seconds` are
    above 0, and so is some column in every row. Every subset of the columns is tried."""
    best: tuple[float, Floats] | None = None
    columns = range(features.shape[1])
    for size in range(1, features.shape[1] + 1):
        for chosen in itertools.combinations(columns, size):
            weighted = features[:, chosen] / seconds[:, None]
            found = np.linalg.lstsq(weighted, np.ones_like(seconds), rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(((weighted @ found - 1) ** 2).sum())
            if best is None or error < best[0]:
                whole = np.zeros(features.shape[1])
                whole[list(chosen)] = found
                best = error, whole
    assert best is not None, "a single coefficient of positive rows is positive"
    residual = seconds - features @ best[1]
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    r2 = 1 - float((residual**2).sum()) / spread if spread else float("nan")
    return [float(value) for value in best[1]], r2
