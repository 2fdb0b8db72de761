"""The last minutes of a journal: cut out of the day, replayed, and measured like what happened.

Requests that come in the *warm-up* before the minutes are replayed, too, but not measured: when the
minutes begin, models are loaded, requests wait and decode, and policies have seen some. What was
live when the warm-up began is the backlog that the replay begins with, as late as it was then. What
arrived before the part of the journal that is read is not known, so it is missing there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from appliance.errors import LabError
from appliance.lab.experiments.metrics import InTime, in_time, measure
from appliance.lab.experiments.run import Contender, Setting, play
from appliance.lab.replay.journal_workload import ENOUGH, JournalRecording
from appliance.lab.sim.simulator import SimulationRun
from appliance.service.policy_report import PolicyChoice
from appliance.vocabulary import Word

WARMUP_SECONDS = 30.0
LEAST_REQUESTS = 50
"""In the window: with fewer, one request in or out of time is two points."""
PARTS = 8
"""Of a window, by which it is known how much other requests would change."""


class Score(Word, frozen=True, kw_only=True, omit_defaults=True):
    """What a replay, or the real run, was worth. Shares are of 1; NaN where nothing is known."""

    tokens: float
    """Share of tokens in time."""
    requests: float
    """Share of requests that met both targets."""
    ttft_p50_seconds: float
    ttft_p99_seconds: float
    switches: int
    refused: int
    parts: tuple[InTime, ...] = ()
    """What both shares are of, by when requests arrived."""

    @property
    def value(self) -> float:
        """What candidates are compared by: the mean of both shares, of what is known; 0 if nothing
        is."""
        return _mean_of_known(self.tokens, self.requests)


def value_of(parts: Sequence[InTime]) -> float:
    """The same of some parts."""
    pairs = (
        (sum([one.tokens_kept for one in parts]), sum([one.tokens for one in parts])),
        (sum([one.requests_kept for one in parts]), sum([one.requests for one in parts])),
    )
    return _mean_of_known(*(kept / of if of else math.nan for kept, of in pairs))


def _mean_of_known(*shares: float) -> float:
    known = [share for share in shares if not math.isnan(share)]
    return math.fsum(known) / len(known) if known else 0.0


@dataclass(frozen=True)
class Window:
    """Seconds of the recorded day: the warm-up, then what is measured."""

    warm_from: float
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Of what is measured."""
        return self.end - self.begin

    def last(self, share: float) -> Window:
        """Its last part, with a warm-up of its own."""
        begin = self.end - share * self.seconds
        return Window(max(self.warm_from, begin - WARMUP_SECONDS), begin, self.end)

    def warmup(self, share: float) -> float:
        """Of its last part, in windows."""
        part = self.last(share)
        return (part.begin - part.warm_from) / self.seconds

    def requests(self, setting: Setting) -> int:
        """How many are measured."""
        return sum(self.begin <= one.seconds <= self.end for one in setting.arrivals)


class Failed(Word, frozen=True, kw_only=True):
    """Questions that a policy could not answer in a replay; the built-in policy did."""

    questions: int
    first: str


def current_choice(found: JournalRecording) -> PolicyChoice:
    """The policies that decide at the journal's end."""
    last = found.contender.successors[-1][1] if found.contender.successors else found.contender
    return PolicyChoice(
        use=tuple(last.use), decisions=dict(last.decisions), parameters=dict(last.parameters)
    )


def window_of(found: JournalRecording, minutes: float, field: str = "--from") -> Window:
    """The last minutes of a journal, or all that there is under its last policies. Raises
    `LabError` if that says too little, with the remedy; `field` is what names the journal."""
    end = found.happened.until
    changes = found.contender.successors
    since = max(0.0, changes[-1][0]) if changes else 0.0
    warmup = min(WARMUP_SECONDS, (end - since) / 4)
    begin = max(end - 60 * minutes, since + warmup)
    window = Window(begin - warmup, begin, end)
    count = window.requests(found.setting)
    if count < LEAST_REQUESTS:
        raise LabError(_too_few(count, window, since, minutes))
    _check_times(found, field)
    return window


def _too_few(count: int, window: Window, since: float, minutes: float) -> str:
    said = (
        f"--minutes: {count} requests arrived in the {window.seconds:.0f} s that can be replayed,"
        f" {LEAST_REQUESTS} are needed"
    )
    if window.seconds >= 60 * minutes - 1:
        return f"{said}: give more than {minutes:g} minutes"
    if since > 0:
        return (
            f"{said}: before that, the journal was recorded with another policy (it was changed"
            f" {window.end - since:.0f} s before the end). Ask again when the box has served longer"
            " under this one"
        )
    return (
        f"{said}: the journal is not longer. Ask again when the box has served longer, or give"
        " --from the journal before a restart, PATH.previous"
    )


def _check_times(found: JournalRecording, field: str) -> None:
    """Whether the journal says how long prompts and steps take."""
    rows = found.measured.values()
    prompts = found.prompts
    turns = sum(len(one.steps) for one in rows)
    decodes = any(one.output_tokens > 1 for one in found.setting.arrivals)
    if prompts < ENOUGH or (decodes and turns < ENOUGH):
        raise LabError(
            f"{field}: the journal has the times of {prompts} prompts and {turns} turns; the lab"
            f" learns how fast this box is from {ENOUGH} of each at least: give"
            " more --minutes. A journal of an older version has no times: record a new one"
            " (`journal.path`)"
        )
    if not found.link_known:
        raise LabError(
            f"{field}: no load of weights was timed in the journal, so how long a switch takes is"
            " not known. Ask again when models were switched"
        )


def replayed(
    found: JournalRecording, window: Window, contender: Contender, seed: int
) -> Score | Failed:
    """What the policy makes of the window in the lab; its cost is that of `play`, which it raises
    from, too."""
    setting = found.setting
    came = [one for one in setting.arrivals if window.warm_from <= one.seconds <= window.end]
    arrivals = [
        msgspec.structs.replace(one, seconds=one.seconds - window.warm_from)
        for one in [*found.carried(window.warm_from), *came]
    ]
    cut = dataclasses.replace(
        setting,
        arrivals=arrivals,
        seconds=window.end - window.warm_from,
        deviation=msgspec.structs.replace(setting.deviation, seed=seed),
        # What the daemon had seen of its box by then; at its start it has seen nothing.
        informed=window.warm_from >= WARMUP_SECONDS,
        start=setting.start and setting.start.after(window.warm_from),
    )
    trial = play(cut, contender)
    if trial.faults:
        first = trial.faults[0]
        return Failed(questions=len(trial.faults), first=f"{first.hook}: {first.reason}")
    return score(trial.run, window.begin - window.warm_from)


def observed(found: JournalRecording, window: Window) -> Score:
    """What really happened in the window, to the requests that can be replayed."""
    recorder = found.happened.recorder
    lives = [
        life if life.model in found.setting.profiles else dataclasses.replace(life, arrived=-1.0)
        for life in recorder.lives
    ]
    run = dataclasses.replace(
        found.happened, recorder=dataclasses.replace(recorder, lives=lives), until=window.end
    )
    return score(run, window.begin)


def score(run: SimulationRun, begin: float) -> Score:
    """Of the requests that arrived from `begin` on."""
    metrics = measure(run, begin)
    return Score(
        tokens=metrics.token_attainment,
        requests=metrics.request_attainment,
        ttft_p50_seconds=metrics.ttft_p50_seconds,
        ttft_p99_seconds=metrics.ttft_p99_seconds,
        switches=sum(switch.at >= begin for switch in run.recorder.switches),
        refused=metrics.rejected,
        parts=in_time(run, begin, run.until, PARTS),
    )
