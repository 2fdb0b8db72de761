"""Makes the traces of the papers' tables in `benchmarks/scenarios/traces/`.

    python benchmarks/paper_traces.py DATA

DATA is a directory with ``multimodel/aegaeon_workloads.csv.gz`` (arrivals that the authors of
Aegaeon drew, Apache-2.0), ``multimodel/arena_chat_27models_600s.csv.gz`` (Chatbot Arena as Prism's
authors sampled it, Apache-2.0) and ``arrivals/azure2023_{conv,code}.csv.gz`` (Azure, CC-BY-4.0).
Columns are those that the lab reads; models are called as the lab calls them by their index. Times
and tokens are as in the sources.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

TRACES = Path(__file__).parent / "scenarios/traces"

Row = tuple[float, str, int, int]
"""Seconds, model, prompt and output tokens."""


def read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(name: str, rows: Iterable[Row]) -> None:
    """The same bytes every time: gzip gets no name and no time."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["arrival_s", "model", "prompt_tokens", "output_tokens"])
    count = 0
    for seconds, *rest in sorted(rows):
        writer.writerow([f"{seconds:.3f}", *rest])
        count += 1
    TRACES.mkdir(exist_ok=True)
    path = TRACES / f"{name}.csv.gz"
    path.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))
    print(path.name, count)


def aegaeon(rows: Sequence[dict[str, str]]) -> None:
    """The workloads of Fig. 11. The one of 40 models at 0.1 is there for 60 s only, as a point of
    Fig. 11c; that of Fig. 11a is its part of the one of 80 models, which extends all others."""

    def of(models: int, rate: str) -> Iterable[Row]:
        for row in rows:
            if (row["num_models"], row["rate_per_model"]) == (str(models), rate):
                index, tokens = int(row["model_idx"]), (row["prompt_tokens"], row["output_tokens"])
                yield float(row["arrival_s"]), f"m{index:03}", int(tokens[0]), int(tokens[1])

    for models in range(16, 81, 4):
        few = [row for row in of(80, "0.1") if int(row[1][1:]) < models]
        write(f"aegaeon_{models}x0.1", few)
    for models in range(16, 57, 4):
        write(f"aegaeon_{models}x0.5", of(models, "0.5"))
    for rate in (f"{step * 0.05:g}" for step in range(1, 15)):
        write(
            f"aegaeon_40x{rate}_60s" if rate in ("0.1", "0.5") else f"aegaeon_40x{rate}",
            of(40, rate),
        )


def arena(rows: Sequence[dict[str, str]]) -> None:
    """As it is: the rank of a model in popularity is its index."""
    write(
        "arena_chat_27models",
        (
            (
                float(row["arrival_s"]),
                f"m{int(row['model_rank']):03}",
                int(row["prompt_tokens"]),
                int(row["output_tokens"]),
            )
            for row in rows
        ),
    )


def azure(services: Mapping[str, tuple[int, Sequence[dict[str, str]]]]) -> None:
    """Four minutes (from the tenth on) of two services, whose requests are spread over so many
    models each: every request draws its model, the k-th as often as 1 / k (seeded). Which request
    was for which model is not in the data; their times, lengths and burstiness are."""
    random = Random(1)
    begin, end = 600.0, 840.0
    spread, first = [], 0
    for count, rows in services.values():
        weights = [1 / rank for rank in range(1, count + 1)]
        for row in rows:
            seconds = float(row["arrival_s"])
            model = first + random.choices(range(count), weights)[0]
            if begin <= seconds < end:
                tokens = int(row["prompt_tokens"]), int(row["output_tokens"])
                spread.append((seconds - begin, f"m{model:03}", *tokens))
        first += count
    write("azure2023_40models", spread)


def main(data: Path) -> None:
    aegaeon(read(data / "multimodel/aegaeon_workloads.csv.gz"))
    arena(read(data / "multimodel/arena_chat_27models_600s.csv.gz"))
    conv, code = (read(data / f"arrivals/azure2023_{name}.csv.gz") for name in ("conv", "code"))
    azure({"conv": (30, conv), "code": (10, code)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
