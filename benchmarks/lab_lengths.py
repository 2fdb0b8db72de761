"""Makes the tables of lengths in `benchmarks/scenarios/lengths/`.

    python benchmarks/lab_lengths.py DATA

DATA is a directory with ``multimodel/aegaeon_workloads.csv.gz`` (ShareGPT lengths as the authors of
Aegaeon drew them, Apache-2.0) and ``lengths/sharegpt_llama2tok.csv.gz`` (Microsoft's sarathi-serve,
Apache-2.0). Each table is a sample of so many pairs, spread evenly over the rows of its source:

    aegaeon.csv            of the workload of 80 models at 0.1 requests a second
    sharegpt.csv           of the first turns of conversations
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path

PAIRS = 10_000


def read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(name: str, rows: Sequence[dict[str, str]]) -> None:
    """At most `PAIRS` of them, in their order."""
    number = min(PAIRS, len(rows))
    chosen = [rows[index * len(rows) // number] for index in range(number)]
    columns = ["prompt_tokens", "output_tokens"]
    path = Path(__file__).parent / "scenarios/lengths" / name
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(chosen)
    for column in columns:
        print(name, column, number, sum(int(row[column]) for row in chosen) / number)


def main(data: Path) -> None:
    drawn = read(data / "multimodel/aegaeon_workloads.csv.gz")
    plain = [row for row in drawn if (row["in_scale"], row["out_scale"]) == ("1", "1")]
    # The workloads extend each other (one seed): those of most models have all requests.
    most = [row for row in plain if (row["num_models"], row["rate_per_model"]) == ("80", "0.5")]
    write("aegaeon.csv", most)
    turns = read(data / "lengths/sharegpt_llama2tok.csv.gz")
    write("sharegpt.csv", [row for row in turns if row["conv_start_guess"] == "1"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
