"""Reads tables of measured steps: CSV files, perhaps compressed (``.csv.gz``).

Every table has the columns ``model``, ``gpu`` and ``tp``, and perhaps ``source``; times are in
milliseconds. The columns of the table say what a row measures:

    num_tokens, total_ms                                       a prompt
    batch_size, kv_tokens, total_ms                            a decoding step
    chunk_tokens, chunk_history, decode_batch, decode_kv_len,  a mixed step: to check predictions
        total_ms
    input_len, batch_size, prefill_ms, decode_ms               a batch of prompts of equal length,
        [, valid_prefill, valid_decode]                        and its first ten steps or so
    prompt_tokens, batch_size, output_tokens, prompt_ms,       the same, and all of its steps
        token_ms
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from appliance.errors import LabError
from appliance.lab.calibration.least_squares import PromptSamples, Steps

FIRST_STEPS_TOKENS = 5
"""Tokens that a sequence has got, on average, over the first steps after its prompt."""


class TableKey(NamedTuple):
    """Who measured what on what."""

    source: str
    model: str
    gpu: str
    tp: int


class MixedStep(NamedTuple):
    """A step that decodes and computes a chunk of a prompt."""

    chunk_tokens: int
    chunk_history: int
    requests: int
    kv_tokens: int
    seconds: float


@dataclass
class Measurements:
    """Rows of one key."""

    prompts: list[tuple[float, float, float, float]] = field(default_factory=list)
    """Tokens, sum of squared lengths, sequences, seconds."""
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    """Requests, tokens of KV, seconds."""
    mixed: list[MixedStep] = field(default_factory=list)

    def prompt_columns(self) -> PromptSamples:
        return PromptSamples(*np.array(self.prompts, dtype=np.float64).reshape(-1, 4).T)

    def step_columns(self) -> Steps:
        return Steps(*np.array(self.steps, dtype=np.float64).reshape(-1, 3).T)


def read_tables(paths: Iterable[Path]) -> dict[TableKey, Measurements]:
    """All rows of these files, by key in the order of the files. A table without ``source`` is its
    own. Raises `LabError` naming the file, and line, that cannot be read."""
    found: dict[TableKey, Measurements] = {}
    for path in paths:
        try:
            lines = csv.DictReader(io.StringIO(_text(path)))
            add = _reader(path, frozenset(lines.fieldnames or ()))
            for row in lines:
                try:
                    source = row.get("source") or path.name.partition(".")[0]
                    key = TableKey(source, row["model"], row["gpu"], int(row["tp"]))
                    add(found.setdefault(key, Measurements()), row)
                except (ValueError, TypeError) as error:
                    raise LabError(f"{path}:{lines.line_num}: {error}") from None
        except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
            raise LabError(f"{path}: {error}") from None
    return found


def _text(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")


Row = Mapping[str, str]


def _prompt(into: Measurements, row: Row) -> None:
    tokens = float(row["num_tokens"])
    into.prompts.append((tokens, tokens**2, 1.0, _seconds(row["total_ms"])))


def _step(into: Measurements, row: Row) -> None:
    into.steps.append(
        (float(row["batch_size"]), float(row["kv_tokens"]), _seconds(row["total_ms"]))
    )


def _mixed(into: Measurements, row: Row) -> None:
    requests = int(row["decode_batch"])
    into.mixed.append(
        MixedStep(
            chunk_tokens=int(row["chunk_tokens"]),
            chunk_history=int(row["chunk_history"]),
            requests=requests,
            kv_tokens=requests * int(row["decode_kv_len"]),
            seconds=_seconds(row["total_ms"]),
        )
    )


def _first_steps(into: Measurements, row: Row) -> None:
    length, batch = float(row["input_len"]), float(row["batch_size"])
    if row.get("valid_prefill", "1") == "1":
        tokens = length * batch
        into.prompts.append((tokens, length * tokens, batch, _seconds(row["prefill_ms"])))
    if row.get("valid_decode", "1") == "1":
        kv_tokens = (length + FIRST_STEPS_TOKENS) * batch
        into.steps.append((batch, kv_tokens, _seconds(row["decode_ms"])))


def _all_steps(into: Measurements, row: Row) -> None:
    length, batch = float(row["prompt_tokens"]), float(row["batch_size"])
    tokens = length * batch
    into.prompts.append((tokens, length * tokens, batch, _seconds(row["prompt_ms"])))
    kv_tokens = (length + float(row["output_tokens"]) / 2) * batch
    into.steps.append((batch, kv_tokens, _seconds(row["token_ms"])))


_KINDS = (
    (_mixed, {"chunk_tokens", "chunk_history", "decode_batch", "decode_kv_len", "total_ms"}),
    (_step, {"batch_size", "kv_tokens", "total_ms"}),
    (_prompt, {"num_tokens", "total_ms"}),
    (_first_steps, {"input_len", "batch_size", "prefill_ms", "decode_ms"}),
    (_all_steps, {"prompt_tokens", "batch_size", "output_tokens", "prompt_ms", "token_ms"}),
)


def _reader(path: Path, columns: frozenset[str]) -> Callable[[Measurements, Row], None]:
    for add, needed in _KINDS:
        if columns >= needed | {"model", "gpu", "tp"}:
            return add
    raise LabError(f"{path}: not a table of steps: its columns are {', '.join(sorted(columns))}")


def _seconds(milliseconds: str) -> float:
    seconds = float(milliseconds) / 1e3
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{milliseconds} ms is no time")
    return seconds
