"""Makes what the scenarios of Prism's, TaiChi's and Chiron's figures read, from public tables.

    python benchmarks/paper_inputs.py DATA

DATA is a directory with the tables named below. Written are, in `benchmarks/scenarios/`:

    traces/prism_arena_8.csv    the models that Prism's released configuration serves on two GPUs
    traces/prism_arena_18.csv   its eighteen on eight GPUs
    traces/prism_arena_54.csv   54 models as Prism Table 4 has them, but for those of 31B to 70B
    lengths/arxiv.csv           arXiv summarization below 4096 tokens
    lengths/sharegpt_2048.csv   ShareGPT with histories, below 2048 tokens in all

and printed are the ``[[profiles]]`` of models that were not measured whole: kernels measured one by
one and added up (the ``*_steps_derived`` tables), fitted as `lab.calibration.least_squares` does.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from appliance.lab.calibration.least_squares import fit

HERE = Path(__file__).parent / "scenarios"
PAIRS = 4000

PROFILES = [
    ("Llama-2-70B", "A100", "4", "vidur_linear+aic_attn"),
    ("Qwen2.5-14B", "A100", "1", "aic_gemm+aic_attn"),
    ("Qwen2.5-32B", "A100", "2", "aic_gemm+aic_attn"),
    ("Llama-3.1-8B", "A100", "1", "aic_gemm+aic_attn"),
    ("Llama-3.1-70B", "A100", "4", "aic_gemm+aic_attn"),
    ("Llama-3.1-8B", "H100", "1", "aic_gemm+aic_attn"),
    ("Llama-3.2-3B", "H100", "1", "aic_gemm+aic_attn"),
    ("Llama-3.2-1B", "H100", "1", "aic_gemm+aic_attn"),
    ("Qwen2.5-14B", "H100", "1", "aic_gemm+aic_attn"),
]

Row = Mapping[str, str]


def read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return list(csv.DictReader(file))


def write(name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    path = HERE / name
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    print(name, sum(1 for _ in path.open()) - 1, file=sys.stderr)


def lengths(name: str, rows: Sequence[Row]) -> None:
    """At most `PAIRS` of them, spread evenly."""
    number = min(PAIRS, len(rows))
    chosen = [rows[index * len(rows) // number] for index in range(number)]
    columns = ("prompt_tokens", "output_tokens")
    write(f"lengths/{name}.csv", columns, [[row[column] for column in columns] for row in chosen])
    for column in columns:
        mean = sum(int(row[column]) for row in chosen) / number
        print(f"  {column} {mean:.0f} on average", file=sys.stderr)


def trace(name: str, rows: Sequence[Row], ranks: Mapping[str, int]) -> None:
    """The requests of every rank, for each of the models that it drives. Where several share a
    rank, the copies come ten seconds apart, as Prism shifts them."""
    shifts: dict[int, int] = {}
    found = []
    for model, rank in ranks.items():
        shift = 10 * shifts.get(rank, 0)
        shifts[rank] = shifts.get(rank, 0) + 1
        for row in rows:
            if int(row["model_rank"]) == rank:
                # Round the end of the trace, so that no copy has fewer requests.
                seconds = (float(row["arrival_s"]) + shift) % 600
                found.append((seconds, model, row["prompt_tokens"], row["output_tokens"]))
    columns = ("arrival_s", "model", "prompt_tokens", "output_tokens")
    ordered = sorted(found)
    write(f"traces/{name}.csv", columns, [(f"{row[0]:.3f}", *row[1:]) for row in ordered])


def profile(data: Path, models: Mapping[str, Row], key: Sequence[str]) -> str:
    """A table of a scenario. Coefficients are seconds."""
    name, gpu, tp, source = key
    columns = ("model", "gpu", "tp", "source")

    def of(file: str) -> list[dict[str, str]]:
        found = read(data / f"profiles/{file}_steps_derived.csv.gz")
        return [row for row in found if tuple(row[column] for column in columns) == tuple(key)]

    prompts, steps = of("prefill"), of("decode")
    tokens = np.array([float(row["num_tokens"]) for row in prompts])
    prefill, prefill_r2 = fit(
        np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1),
        np.array([float(row["total_ms"]) / 1000 for row in prompts]),
    )
    batch = np.array([float(row["batch_size"]) for row in steps])
    kv = np.array([float(row["kv_tokens"]) for row in steps])
    step, step_r2 = fit(
        np.stack([np.ones_like(batch), kv, batch], axis=1),
        np.array([float(row["total_ms"]) / 1000 for row in steps]),
    )
    known = models[name]
    return "\n".join(
        [
            f"[[profiles]] # {gpu}, {source}; R2 {prefill_r2:.3f} prompts, {step_r2:.3f} steps",
            f'name = "{name}"',
            f"weight_bytes = {2 * int(known['params_computed'])}",
            f"layers = {known['layers']}",
            f"hidden = {known['hidden']}",
            f"kv_bytes_per_token = {known['kv_bytes_per_token_16bit']}",
            f"tp = {tp}",
            f"prefill_base_seconds = {prefill[0]:.6g}",
            f"prefill_seconds_per_token = {prefill[1]:.6g}",
            f"prefill_seconds_per_token2 = {prefill[2]:.6g}",
            f"step_base_seconds = {step[0]:.6g}",
            f"step_seconds_per_kv_token = {step[1]:.6g}",
            f"step_seconds_per_sequence = {step[2]:.6g}",
            "",
        ]
    )


def main(data: Path) -> None:
    arena = read(data / "multimodel/arena_chat_27models_600s.csv.gz")
    prism = read(data / "multimodel/prism_slo_baselines.csv")
    for count in ("8", "18"):
        mine = [row for row in prism if row["experiment"] == f"{count}models"]
        ranks = {row["model_id"]: int(row["trace_model_rank"]) for row in mine}
        trace(f"prism_arena_{count}", arena, ranks)
    # Every rank twice: the trace has 27 of the 54.
    trace("prism_arena_54", arena, {f"model_{index + 1}": index % 27 for index in range(54)})
    lengths("arxiv", read(data / "lengths/arxiv_summarization_llama2tok.csv.gz"))
    chats = read(data / "lengths/sharegpt_llama2tok.csv.gz")
    short = [r for r in chats if int(r["prompt_tokens"]) + int(r["output_tokens"]) <= 2048]
    lengths("sharegpt_2048", short)
    models = {row["model"]: row for row in read(data / "models.csv")}
    for key in PROFILES:
        print(profile(data, models, key))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
