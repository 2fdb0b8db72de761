"""What a run was worth: token deadlines kept, requests served in time, what the hardware did.

Token k of a request (from 0) is due at ``arrival + TTFT + k * TBT`` (Aegaeon §2.1), or, where an
SLO has a longest gap, that long after token k - 1, if that is earlier. What had not ended when the
run did counts with the deadlines that had passed by then; what was refused counts with all of its
tokens. O(tokens), in vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.lab.sim.recorder import Life, Recorder
from appliance.lab.sim.samples import by_shape, fragmentation, mapped_bytes
from appliance.lab.sim.simulator import SimulationRun
from appliance.vocabulary import FinishReason, RequestClass, Word

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOLERANCE_SECONDS = 1e-9
"""Deadlines and times are sums; a deadline is not missed by their rounding."""

NEAR_INSTANT_SECONDS = 0.05
"""A switch that waits no longer found its weights in place, or nearly so."""


class RunMetrics(Word, frozen=True, kw_only=True):
    """Shares are of 1; times are seconds; NaN where there was nothing to measure."""

    requests: int
    finished: int
    rejected: int
    tokens: int
    token_attainment: float
    """Share of token deadlines that were kept (Aegaeon §2.1)."""
    time_attainment: float
    """Share of seconds covered, averaged over requests (as Aegaeon's artifact counts)."""
    ttft_attainment: float
    tpot_attainment: float
    request_attainment: float
    """Share of requests that kept both: the first token, and the mean time between tokens."""
    vllm_attainment: float
    """The same as vLLM counts (TaiChi §2.3.2): the wait for a place to decode belongs to the first
    token, and the mean is over the tokens after that."""
    goodput_per_second: float
    """Requests that kept both, per second."""
    tokens_per_second: float
    ttft_p50_seconds: float
    ttft_p99_seconds: float
    tbt_p50_seconds: float
    tbt_p99_seconds: float
    busy_share: float
    """Of all instances' time, the share in which they computed."""
    switches: int
    switch_mean_seconds: float
    switch_instant_share: float
    """Of the switches, those that waited at most 50 ms."""
    preemptions: int
    loads: int
    prefetches: int
    interactive_attainment: float
    """Share of interactive requests that kept both."""
    interactive_ttft_p50_seconds: float
    interactive_ttft_p99_seconds: float
    interactive_done_per_second: float
    """Requests that ended well."""
    interactive_tokens_per_second: float
    batch_requests: int
    batch_attainment: float
    """Share of batch requests that kept both."""
    batch_in_time: float
    """Share of batch requests that were done when their last token was due."""
    batch_done_per_second: float
    batch_tokens_per_second: float
    gpus_with_work: float
    """GPUs of instances that had requests, on average."""
    gpus_opened: float
    """GPUs of instances that the policy had not parked, on average."""
    fragmentation: float
    """Of KV on the GPUs: unused / peak allocated (Aegaeon §7.3), on average."""
    host_fragmentation: float
    """Of KV in the host tier."""
    weights_mean_bytes: float
    """On a GPU."""
    kv_mean_bytes: float
    """On a GPU, in whole slabs."""
    host_weights_peak_bytes: float
    host_kv_peak_bytes: float
    """In whole slabs."""

    def rounded(self, digits: int = 6) -> dict[str, float]:
        """For people and for files: no more digits than mean anything."""
        return {name: round(getattr(self, name), digits) for name in self.__struct_fields__}


class InTime(Word, frozen=True):
    """Of some requests, what was in time, and of how much that is known."""

    tokens_kept: int
    tokens: int
    requests_kept: int
    requests: int


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Every token of some requests: the request's place in the list, the token's, its time."""

    request: Ints
    index: Ints
    seconds: Floats


def expand(recorder: Recorder, lives: Sequence[Life]) -> TokenTimes:
    """The tokens of these requests, one request after the other, each in the order of time."""
    place = np.full(len(recorder.lives), -1, dtype=np.int64)
    place[[life.number for life in lives]] = np.arange(len(lives))
    owner = place[np.frombuffer(recorder.requests, dtype=np.int64)]
    order = np.argsort(owner, kind="stable")
    order = order[owner[order] >= 0]
    owner = owner[order]
    starts, firsts, growths = (
        np.frombuffer(column, dtype=np.float64)[order]
        for column in (recorder.starts, recorder.firsts, recorder.growths)
    )
    counts = np.frombuffer(recorder.counts, dtype=np.int64)[order]
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    position = np.arange(total)
    step = position - np.repeat(before, counts) + 1
    seconds = np.repeat(starts, counts) + (
        step * np.repeat(firsts, counts) + np.repeat(growths, counts) * (step * (step - 1) / 2)
    )
    request = np.repeat(owner, counts)
    produced = np.bincount(request, minlength=len(lives))
    return TokenTimes(
        request, position - np.repeat(np.cumsum(produced) - produced, produced), seconds
    )


def measure(run: SimulationRun, warmup_seconds: float = 0.0) -> RunMetrics:
    """The metrics of the requests that arrived after the warm-up."""
    recorder, until = run.recorder, run.until
    lives = [life for life in recorder.lives if life.arrived >= warmup_seconds]
    table = _Requests(lives, expand(recorder, lives), until)
    waits = np.array([switch.waited for switch in recorder.switches])
    waits = waits[~np.isnan(waits)]
    seconds = until - warmup_seconds
    both = table.both_kept()
    batch = np.array([life.request_class is RequestClass.BATCH for life in lives], dtype=bool)
    samples = [sample for sample in run.samples if sample.at > warmup_seconds]
    return RunMetrics(
        requests=len(lives),
        finished=int(table.finished.sum()),
        rejected=int(table.rejected.sum()),
        tokens=len(table.tokens.seconds),
        token_attainment=table.token_attainment(),
        time_attainment=table.time_attainment(),
        ttft_attainment=_mean(table.ttft_kept()),
        tpot_attainment=_mean(table.tpot_kept()),
        request_attainment=_mean(both),
        vllm_attainment=_mean(table.both_kept_decoding()),
        goodput_per_second=float(np.nansum(both)) / seconds,
        tokens_per_second=len(table.tokens.seconds) / seconds,
        ttft_p50_seconds=_percentile(table.ttft, 50),
        ttft_p99_seconds=_percentile(table.ttft, 99),
        tbt_p50_seconds=_percentile(table.gaps, 50),
        tbt_p99_seconds=_percentile(table.gaps, 99),
        busy_share=sum(recorder.busy.values()) / (until * run.instances),
        switches=len(recorder.switches),
        switch_mean_seconds=_mean(waits),
        switch_instant_share=_mean((waits <= NEAR_INSTANT_SECONDS).astype(float)),
        preemptions=run.preemptions,
        loads=recorder.loads,
        prefetches=recorder.prefetches,
        interactive_attainment=_mean(both[~batch]),
        interactive_ttft_p50_seconds=_percentile(table.ttft[~batch], 50),
        interactive_ttft_p99_seconds=_percentile(table.ttft[~batch], 99),
        interactive_done_per_second=float(table.finished[~batch].sum()) / seconds,
        interactive_tokens_per_second=float(table.produced[~batch].sum()) / seconds,
        batch_requests=int(batch.sum()),
        batch_attainment=_mean(both[batch]),
        batch_in_time=_mean(table.done_in_time()[batch]),
        batch_done_per_second=float(table.finished[batch].sum()) / seconds,
        batch_tokens_per_second=float(table.produced[batch].sum()) / seconds,
        gpus_with_work=_mean(np.array([s.with_work * run.tp for s in samples], dtype=float)),
        gpus_opened=_mean(np.array([s.opened * run.tp for s in samples], dtype=float)),
        fragmentation=fragmentation([s.device for s in samples]),
        host_fragmentation=fragmentation([s.host for s in samples]),
        weights_mean_bytes=_mean(np.array([s.weights for s in samples], dtype=float)),
        kv_mean_bytes=_mean(np.array([s.kv for s in samples], dtype=float)),
        host_weights_peak_bytes=_most([s.host_weights for s in samples]),
        host_kv_peak_bytes=_most([mapped_bytes(s.host) for s in samples]),
    )


def in_time(run: SimulationRun, begin: float, end: float, parts: int) -> tuple[InTime, ...]:
    """What was in time of the requests that arrived in each of so many equal parts of a time."""
    lives = [life for life in run.recorder.lives if begin <= life.arrived <= end]
    table = _Requests(lives, expand(run.recorder, lives), run.until)
    place = np.minimum(((table.arrived - begin) / (end - begin) * parts).astype(int), parts - 1)
    both = table.both_kept()
    columns = (table.kept(), table.due_tokens(), both == 1, ~np.isnan(both))
    sums = [np.bincount(place, weights=one, minlength=parts).astype(int) for one in columns]
    return tuple(InTime(*map(int, row)) for row in zip(*sums, strict=True))


def fragmentation_by_shape(
    run: SimulationRun, warmup_seconds: float = 0.0
) -> dict[str, dict[str, float]]:
    """Of KV in each tier, by the bytes of a block."""
    samples = [sample for sample in run.samples if sample.at > warmup_seconds]
    tiers = {"device": [s.device for s in samples], "host": [s.host for s in samples]}
    return {
        tier: {str(shape): round(share, 6) for shape, share in by_shape(uses).items()}
        for tier, uses in tiers.items()
    }


class Bar(Word, frozen=True):
    """What an instance was at, for a plot of it: a turn, or a prompt alone."""

    instance: int
    model: str
    began: float
    ended: float
    turn: bool


class Curves(Word, frozen=True, kw_only=True):
    """What plots are made of. Quantiles are at `QUANTILES`."""

    ttft_quantiles: Sequence[float]
    tbt_quantiles: Sequence[float]
    window_seconds: float
    attainment: Sequence[float]
    """Of the tokens that came in each window of the run; NaN where none did."""
    bars: Sequence[Bar]
    """Of the first minute after the warm-up."""
    looks: Sequence[float]
    """When the box was looked at; the rest has a figure for each of them."""
    gpus_with_work: Sequence[int]
    gpus_opened: Sequence[int]
    weights_share: Sequence[Sequence[float]]
    """Of the pool of a GPU of each instance."""
    kv_share: Sequence[Sequence[float]]
    """The same."""


QUANTILES = np.linspace(0, 1, 201)


def curves(run: SimulationRun, warmup_seconds: float = 0.0, windows: int = 60) -> Curves:
    """What plots of the run are made of."""
    recorder = run.recorder
    lives = [life for life in recorder.lives if life.arrived >= warmup_seconds]
    table = _Requests(lives, expand(recorder, lives), run.until)
    tokens = table.tokens
    kept = (tokens.seconds <= table.due() + TOLERANCE_SECONDS).astype(float)
    window = run.until / windows
    place = np.minimum((tokens.seconds / window).astype(np.int64), windows - 1)
    came = np.bincount(place, minlength=windows)
    with np.errstate(invalid="ignore"):
        attainment = np.bincount(place, weights=kept, minlength=windows) / came
    end = warmup_seconds + 60.0
    return Curves(
        ttft_quantiles=_quantiles(table.ttft[np.isfinite(table.ttft)]),
        tbt_quantiles=_quantiles(table.gaps),
        window_seconds=window,
        attainment=[float(value) for value in attainment],
        bars=[
            Bar(span.instance, span.model, span.began, span.ended, span.steps > 0)
            for span in recorder.spans
            if span.ended > warmup_seconds and span.began < end
        ],
        looks=[s.at for s in run.samples],
        gpus_with_work=[s.with_work * run.tp for s in run.samples],
        gpus_opened=[s.opened * run.tp for s in run.samples],
        weights_share=[[held / run.pool_bytes for held in s.weights] for s in run.samples],
        kv_share=[[held / run.pool_bytes for held in s.kv] for s in run.samples],
    )


def _quantiles(values: Floats) -> list[float]:
    return [float(value) for value in np.quantile(values, QUANTILES)] if len(values) else []


def seconds_covered(seconds: Floats, ttft_seconds: float, tbt_seconds: float, end: float) -> float:
    """Seconds for which a request's reader had something to read, as Aegaeon's artifact counts.

    `seconds` are the times of its tokens since it arrived, `end` that of the last one. Token k is
    in time within ``TTFT + k * TBT`` of a clock that starts again at every late token, while that
    allowance keeps growing; so it is too lenient after the first late token, and may cover more
    than there was. Kept as it is, to compare with the figures it made.
    """
    allowed = ttft_seconds + tbt_seconds * np.arange(len(seconds))
    lateness = seconds - allowed - TOLERANCE_SECONDS
    covered, clock, since = 0.0, 0.0, 0
    while True:
        late = np.nonzero(lateness[since:] > clock)[0]
        if not len(late):
            return covered + min(ttft_seconds + tbt_seconds * len(seconds), end - clock)
        token = since + int(late[0])
        if token > since:
            covered += float(allowed[token - 1])
        clock, since = float(seconds[token]), token + 1


class _Requests:
    """Columns, one row for each request."""

    def __init__(self, lives: Sequence[Life], tokens: TokenTimes, until: float) -> None:
        self.tokens = tokens
        self.until = until
        self.arrived = np.array([life.arrived for life in lives])
        self.ttft_slo = np.array([life.slo.ttft_seconds for life in lives])
        self.tbt_slo = np.array([life.slo.tbt_seconds for life in lives])
        self.gap_slo = np.array([life.slo.gap_seconds or np.inf for life in lives])
        self.output = np.array([life.output_tokens for life in lives], dtype=np.int64)
        reasons = set(FinishReason)
        self.finished = np.array([life.outcome in reasons for life in lives], dtype=bool)
        ended = np.array([life.outcome is not None for life in lives], dtype=bool)
        self.rejected = ended & ~self.finished
        self.produced = np.bincount(tokens.request, minlength=len(lives))
        ends = np.cumsum(self.produced)
        some = self.produced > 0
        self.first = np.full(len(lives), np.inf)
        self.last = np.full(len(lives), np.inf)
        self.first[some] = tokens.seconds[(ends - self.produced)[some]]
        self.last[some] = tokens.seconds[ends[some] - 1]
        waiting = np.where(self.rejected, np.inf, until - self.arrived)
        self.ttft = np.where(some, self.first - self.arrived, waiting)
        """To the first token; for who has none, the time waited so far."""
        follows = tokens.index[1:] > 0
        self.gaps = np.diff(tokens.seconds)[follows]

    def due(self) -> Floats:
        """When each token is."""
        request, index = self.tokens.request, self.tokens.index
        due: Floats = (self.arrived + self.ttft_slo)[request] + index * self.tbt_slo[request]
        follows = np.nonzero(index > 0)[0]
        gap_over = self.tokens.seconds[follows - 1] + self.gap_slo[request[follows]]
        due[follows] = np.minimum(due[follows], gap_over)
        return due

    def kept(self) -> Ints:
        """How many tokens of each were in time."""
        tokens = self.tokens
        kept = tokens.seconds <= self.due() + TOLERANCE_SECONDS
        return np.bincount(tokens.request[kept], minlength=len(self.arrived))

    def due_tokens(self) -> Ints:
        """How many tokens of each there are, or should have been there."""
        passed = np.floor((self.until - self.arrived - self.ttft_slo) / self.tbt_slo) + 1
        # The gap after the newest token is over, too: then the next one is late, whatever its turn.
        paused = (self.produced > 0) & (self.until > self.last + self.gap_slo)
        passed = np.where(paused, np.maximum(passed, self.produced + 1), passed)
        passed = np.clip(passed, 0, self.output)
        passed = np.where(self.finished, 0, np.where(self.rejected, self.output, passed))
        due: Ints = np.maximum(passed, self.produced).astype(np.int64)
        return due

    def token_attainment(self) -> float:
        return _ratio(int(self.kept().sum()), float(self.due_tokens().sum()))

    def time_attainment(self) -> float:
        """Requests that did not end are looked at as if it were now that they did."""
        shares = []
        ends = np.cumsum(self.produced)
        for row, produced in enumerate(self.produced):
            end = float(self.last[row] if self.finished[row] else self.until)
            lasted = end - float(self.arrived[row])
            ttft, tbt = float(self.ttft_slo[row]), float(self.tbt_slo[row])
            if self.rejected[row] or (not produced and lasted > ttft):
                shares.append(0.0)
            elif produced and lasted > 0:
                mine = self.tokens.seconds[ends[row] - produced : ends[row]] - self.arrived[row]
                shares.append(seconds_covered(mine, ttft, tbt, lasted) / lasted)
        return _mean(np.array(shares))

    def ttft_kept(self) -> Floats:
        """1 kept, 0 missed, NaN not known yet."""
        kept = (self.ttft <= self.ttft_slo + TOLERANCE_SECONDS).astype(float)
        undecided = (self.produced == 0) & (kept > 0)
        return np.where(undecided, np.nan, kept)

    def tpot_kept(self) -> Floats:
        """By the mean time between tokens; of an unfinished request by that so far, if missed."""
        gaps = np.where(self.finished, self.produced - 1, self.produced)
        spent = np.where(self.finished, self.last, self.until) - self.first
        with np.errstate(invalid="ignore"):
            mean = np.where(gaps > 0, spent / np.maximum(1, gaps), 0.0)
        kept = (mean <= self.tbt_slo + TOLERANCE_SECONDS).astype(float)
        kept = np.where(self.produced == 0, self.ttft_kept(), kept)
        kept = np.where(self.rejected, 0.0, kept)
        return np.where(~self.finished & (kept > 0), np.nan, kept)

    def done_in_time(self) -> Floats:
        """By when the last token was due; NaN while neither is known."""
        due = self.arrived + self.ttft_slo + (self.output - 1) * self.tbt_slo + TOLERANCE_SECONDS
        late = np.where(self.finished, self.last, self.until) > due
        kept = np.where(self.rejected | late, 0.0, 1.0)
        return np.where(~self.finished & (kept > 0), np.nan, kept)

    def both_kept(self) -> Floats:
        """NaN while neither was missed and one is not known."""
        return self._both(self.ttft_kept(), self.tpot_kept())

    def both_kept_decoding(self) -> Floats:
        """The same, with the first token where decoding begins: a mean gap before the second one.
        Requests that did not finish, or have less than three tokens, are as in `both_kept`."""
        some = self.finished & (self.produced > 2)
        second = np.full(len(self.first), np.nan)
        at = np.cumsum(self.produced) - self.produced + 1
        second[some] = self.tokens.seconds[at[some]]
        with np.errstate(invalid="ignore"):
            gap = (self.last - second) / np.maximum(1, self.produced - 2)
            begun = np.maximum(self.first, second - gap) - self.arrived
            ttft = (begun <= self.ttft_slo + TOLERANCE_SECONDS).astype(float)
            tpot = (gap <= self.tbt_slo + TOLERANCE_SECONDS).astype(float)
        return self._both(
            np.where(some, ttft, self.ttft_kept()), np.where(some, tpot, self.tpot_kept())
        )

    @staticmethod
    def _both(ttft: Floats, tpot: Floats) -> Floats:
        both = np.stack([ttft, tpot])
        missed = (both == 0).any(axis=0)
        return np.where(missed, 0.0, np.where(np.isnan(both).any(axis=0), np.nan, 1.0))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _most(values: Sequence[int]) -> float:
    return float(max(values)) if values else float("nan")


def _percentile(values: Floats, percent: float) -> float:
    return float(np.percentile(values, percent, method="lower")) if len(values) else float("nan")
