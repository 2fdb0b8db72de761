"""Makes `appliance/lab/profiles.csv`: step times of models on GPUs, fitted to measured steps.

    python benchmarks/lab_profiles.py DATA > appliance/lab/profiles.csv

DATA is a directory with ``models.csv`` and ``profiles/whole_model_steps_aegaeon.csv.gz`` (vLLM
steps measured by the authors of Aegaeon, Apache-2.0). The forms are those of Aegaeon's estimator:

    prefill = base + per_token * t + per_token2 * t^2        (a batch adds its squares up)
    decode  = base + per_kv_token * kv + per_sequence * n

by least squares of the relative error, with no negative coefficient: a step never gets faster
because there is more to do. R^2 is of the seconds themselves, on the same rows.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

COLUMNS = [
    *("model", "gpu", "tp", "weight_bytes", "layers", "hidden", "kv_bytes_per_token"),
    *("prefill_seconds", "prefill_seconds_per_token", "prefill_seconds_per_token2", "prefill_r2"),
    *("step_seconds", "step_seconds_per_kv_token", "step_seconds_per_sequence", "step_r2"),
]


def fit(features: np.ndarray, seconds: np.ndarray) -> tuple[list[float], float]:
    """The best coefficients, none negative, and R^2: every subset of them is tried."""
    best: tuple[float, np.ndarray] | None = None
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
    r2 = 1 - (residual**2).sum() / ((seconds - seconds.mean()) ** 2).sum()
    return [float(value) for value in best[1]], float(r2)


def main(data: Path) -> None:
    with (data / "models.csv").open() as file:
        models = {row["model"]: row for row in csv.DictReader(file)}
    steps = defaultdict(list)
    with gzip.open(data / "profiles/whole_model_steps_aegaeon.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            steps[row["model"], row["gpu"], int(row["tp"])].append(row)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for (model, gpu, tp), rows in sorted(steps.items()):
        known = models.get(model)
        if known is None:
            print(f"{model}: not in models.csv", file=sys.stderr)
            continue
        prefills = [row for row in rows if row["valid_prefill"] == "1"]
        decodes = [row for row in rows if row["valid_decode"] == "1"]
        size = [(int(row["input_len"]), int(row["batch_size"])) for row in prefills]
        prefill, prefill_r2 = fit(
            np.array([[1.0, length * n, length * length * n] for length, n in size]),
            np.array([float(row["prefill_ms"]) / 1000 for row in prefills]),
        )
        size = [(int(row["input_len"]), int(row["batch_size"])) for row in decodes]
        step, step_r2 = fit(
            np.array([[1.0, (length + 5) * n, n] for length, n in size]),
            np.array([float(row["decode_ms"]) / 1000 for row in decodes]),
        )
        writer.writerow(
            [
                model,
                gpu,
                tp,
                2 * int(known["params_computed"]),
                known["layers"],
                known["hidden"],
                known["kv_bytes_per_token_16bit"],
                *(f"{value:.6g}" for value in prefill),
                f"{prefill_r2:.4f}",
                *(f"{value:.6g}" for value in step),
                f"{step_r2:.4f}",
            ]
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
