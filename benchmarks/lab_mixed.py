"""How far the lab's mixed steps are from tables of them, when it knows plain steps only.

    python benchmarks/lab_mixed.py DATA

DATA is a directory with ``profiles/{prefill,decode,mixed}_steps_derived.csv.gz``. For each model
and GPU, times are fitted to prompts of 64 to 8192 tokens and to decoding steps of at most 64
requests; printed is what they predict of the mixed steps, over what the table has: median, least
and largest by tokens of the chunk.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from appliance.lab.fitting import fit
from appliance.lab.hardware import ModelProfile

Key = tuple[str, ...]


def read(path: Path) -> dict[Key, list[dict[str, str]]]:
    rows: dict[Key, list[dict[str, str]]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            rows[row["source"], row["model"], row["gpu"], row["tp"]].append(row)
    return rows


def fitted(prompts: list[dict[str, str]], steps: list[dict[str, str]]) -> ModelProfile:
    tokens = np.array([int(row["num_tokens"]) for row in prompts])
    seconds = np.array([float(row["total_ms"]) / 1e3 for row in prompts])
    some = (tokens >= 64) & (tokens <= 8192)
    tokens, seconds = tokens[some], seconds[some]
    prompt, _ = fit(np.c_[np.ones(len(tokens)), tokens, tokens**2], seconds)
    few = [row for row in steps if int(row["batch_size"]) <= 64]
    sizes = np.array([(1, int(row["kv_tokens"]), int(row["batch_size"])) for row in few])
    step, _ = fit(sizes, np.array([float(row["total_ms"]) / 1e3 for row in few]))
    return ModelProfile(
        name="fitted",
        weight_bytes=0,
        layers=0,
        hidden=0,
        kv_bytes_per_token=0,
        prefill_base_seconds=prompt[0],
        prefill_seconds_per_token=prompt[1],
        prefill_seconds_per_token2=prompt[2],
        step_base_seconds=step[0],
        step_seconds_per_kv_token=step[1],
        step_seconds_per_sequence=step[2],
    )


def main(data: Path) -> None:
    prompts = read(data / "profiles/prefill_steps_derived.csv.gz")
    steps = read(data / "profiles/decode_steps_derived.csv.gz")
    for key, rows in read(data / "profiles/mixed_steps_derived.csv.gz").items():
        model = fitted(prompts[key], steps[key])
        ratios: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            batch, chunk = int(row["decode_batch"]), int(row["chunk_tokens"])
            if chunk:
                kv_tokens = batch * int(row["decode_kv_len"])
                chunks = [(chunk, int(row["chunk_history"]))]
                seconds = model.mixed_step_seconds(batch, kv_tokens, chunks)
                ratios[chunk].append(seconds / (float(row["total_ms"]) / 1e3))
        print(*key)
        for chunk, found in sorted(ratios.items()):
            print(f"  {chunk:5} {np.median(found):.2f} {min(found):.2f} {max(found):.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
