"""Requests for a run: drawn per model from seeded streams, or read from a trace.

Every model draws from a stream of its own, made of the seed and its name: another model more, or
another rate for one, leaves the requests of the others as they are.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np

from appliance.errors import LabError
from appliance.vocabulary import ModelName, RequestClass, Slo, Word


class Arrival(Word, frozen=True, kw_only=True):
    """A request that will come. `output_tokens` is the truth, which only the lab knows."""

    seconds: float
    model: ModelName
    prompt_tokens: int
    output_tokens: int
    request_class: RequestClass = RequestClass.INTERACTIVE
    max_tokens: int | None = None
    """What the client allows; None for all that the context has room for."""
    slo: Slo | None = None
    """Its own; None for that of its model."""
    key: str = ""
    """Name of the API key that asks; empty if there is none."""


class Lengths:
    """Pairs of prompt and output tokens to draw from, each as likely as any other."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            raise LabError("there are no lengths to draw from")
        self.prompts = np.array([prompt for prompt, _ in pairs], dtype=np.int64)
        self.outputs = np.array([output for _, output in pairs], dtype=np.int64)

    @classmethod
    def read(cls, path: Path) -> Lengths:
        """From the columns ``prompt_tokens`` and ``output_tokens`` of a CSV file (may be .gz)."""
        rows = _rows(path, ("prompt_tokens", "output_tokens"))
        return cls(
            [(_count(path, r, "prompt_tokens"), _count(path, r, "output_tokens")) for r in rows]
        )

    def scaled(self, prompt: float = 1.0, output: float = 1.0) -> Lengths:
        """The same, so many times as long, at least one token each."""
        scaled = Lengths.__new__(Lengths)
        scaled.prompts = np.maximum(1, np.rint(self.prompts * prompt)).astype(np.int64)
        scaled.outputs = np.maximum(1, np.rint(self.outputs * output)).astype(np.int64)
        return scaled

    def with_means(self, prompt_tokens: float | None, output_tokens: float | None) -> Lengths:
        """Scaled to these means (to rounding); None leaves them as they are."""
        return self.scaled(
            1.0 if prompt_tokens is None else prompt_tokens / float(self.prompts.mean()),
            1.0 if output_tokens is None else output_tokens / float(self.outputs.mean()),
        )

    def within(self, total_tokens: int) -> Lengths:
        """Those too long for a context are scaled down to it (as Aegaeon's artifact does)."""
        factor = np.minimum(1.0, total_tokens / (self.prompts + self.outputs))
        fitted = Lengths.__new__(Lengths)
        fitted.prompts = np.maximum(1, np.floor(self.prompts * factor)).astype(np.int64)
        fitted.outputs = np.maximum(1, np.floor(self.outputs * factor)).astype(np.int64)
        return fitted


def drawn(
    rates: Mapping[ModelName, float],
    lengths: Lengths,
    seconds: float,
    seed: int,
    cv: float = 1.0,
    request_class: RequestClass = RequestClass.INTERACTIVE,
    phases: Sequence[tuple[float, float]] = (),
) -> list[Arrival]:
    """Requests of each model at its rate (per second) until `seconds`, in the order of time.

    Gaps are Gamma distributed with coefficient of variation `cv`; 1 is a Poisson process. From the
    time of each of `phases`, which are in order, the rate is so many times what it was asked for.
    """
    streams = [
        _stream(model, rate, lengths, seconds, seed, cv, request_class, phases)
        for model, rate in rates.items()
    ]
    return list(heapq.merge(*streams, key=lambda arrival: (arrival.seconds, arrival.model)))


def backlog(
    models: Iterable[ModelName], count: int, lengths: Lengths, at_seconds: float, seed: int
) -> list[Arrival]:
    """Batch requests, `count` for each model, that all come at once."""
    made = []
    for model in models:
        sizes = _random(seed, model, _BACKLOG_SIZES)
        rows = sizes.integers(len(lengths.prompts), size=count).tolist()
        made += [_arrival(at_seconds, model, lengths, row, RequestClass.BATCH) for row in rows]
    return made


def with_keys(
    arrivals: Iterable[Arrival], shares: Mapping[str, float], seed: int
) -> Iterator[Arrival]:
    """The requests, each that has no key with one of these; they get shares in proportion."""
    if not shares:
        yield from arrivals
        return
    names, weights = list(shares), np.array(list(shares.values()))
    dice = _random(seed, "", _KEYS)
    for arrival in arrivals:
        drawn_key = names[int(dice.choice(len(names), p=weights / weights.sum()))]
        yield arrival if arrival.key else msgspec.structs.replace(arrival, key=drawn_key)


_GAPS, _SIZES, _BATCH_GAPS, _BATCH_SIZES, _BACKLOG_SIZES, _KEYS = range(6)
"""Streams of a model."""


def _random(seed: int, model: ModelName, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, zlib.crc32(model.encode()), stream]))


def _stream(
    model: ModelName,
    rate: float,
    lengths: Lengths,
    seconds: float,
    seed: int,
    cv: float,
    request_class: RequestClass,
    phases: Sequence[tuple[float, float]],
) -> Iterator[Arrival]:
    if rate <= 0:
        return
    batch = request_class is RequestClass.BATCH
    gaps = _random(seed, model, _BATCH_GAPS if batch else _GAPS)
    sizes = _random(seed, model, _BATCH_SIZES if batch else _SIZES)
    shape = 1 / (cv * cv)
    steady = 0.0
    while True:
        steady += float(gaps.gamma(shape, 1 / (rate * shape)))
        now = _when(steady, phases)
        if now >= seconds:
            return
        yield _arrival(
            now, model, lengths, int(sizes.integers(len(lengths.prompts))), request_class
        )


def _when(steady: float, phases: Sequence[tuple[float, float]]) -> float:
    """When what comes at `steady` seconds of a steady rate comes, if the rate has phases."""
    began, scale = 0.0, 1.0
    for at, next_scale in phases:
        passed = (at - began) * scale
        if steady < passed:
            break
        steady -= passed
        began, scale = at, next_scale
    return began + steady / scale if scale else math.inf


def _arrival(
    seconds: float, model: ModelName, lengths: Lengths, row: int, request_class: RequestClass
) -> Arrival:
    return Arrival(
        seconds=seconds,
        model=model,
        prompt_tokens=int(lengths.prompts[row]),
        output_tokens=int(lengths.outputs[row]),
        request_class=request_class,
    )


def read_trace(path: Path, rate_scale: float = 1.0) -> list[Arrival]:
    """A trace: ``arrival_s,model,prompt_tokens,output_tokens[,class][,key]`` (CSV, may be .gz).

    `rate_scale` 2 plays it twice as fast. Raises `LabError` naming the line that is wrong.
    """
    arrivals = []
    for row in _rows(path, ("arrival_s", "model", "prompt_tokens", "output_tokens")):
        try:
            seconds = float(row["arrival_s"]) / rate_scale
            request_class = RequestClass(row.get("class") or RequestClass.INTERACTIVE)
        except ValueError as error:
            raise LabError(f"{path}:{row['line']}: {error}") from None
        arrivals.append(
            Arrival(
                seconds=seconds,
                model=row["model"],
                prompt_tokens=_count(path, row, "prompt_tokens"),
                output_tokens=_count(path, row, "output_tokens"),
                request_class=request_class,
                key=row.get("key") or "",
            )
        )
    return sorted(arrivals, key=lambda arrival: arrival.seconds)


def _count(path: Path, row: Mapping[str, str], column: str) -> int:
    try:
        return max(1, int(row[column]))
    except ValueError as error:
        raise LabError(f"{path}:{row['line']}: {column}: {error}") from None


def _rows(path: Path, columns: Iterable[str]) -> Iterator[dict[str, str]]:
    """The rows of a table, with the number of each as ``line``."""
    with _open(path) as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise LabError(f"{path}: no column {', '.join(missing)}")
        for line, row in enumerate(reader, start=2):
            yield {**row, "line": str(line)}


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")
