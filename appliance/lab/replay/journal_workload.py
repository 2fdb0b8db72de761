"""A journal of a real daemon as a workload: its requests, its box, and how fast that was.

What the journal does not say is taken as: a request that had not ended, or was refused, has as many
tokens as answers that were longer than what it had got have on average (`output_lengths`); a client
that left would have left after as many tokens from any policy; the vector of a prompt that
was embedded is a token; layers are loaded as evenly as in a model of `LAYERS` layers. Step times
are fitted to the journal's own turns and prompts. Where a policy always has prompts computed in
turns that decode, what such turns take longer than their decoding is the prompts'. Where all
prompts begin before their weights are there, they count as long as they took.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from appliance.errors import LabError
from appliance.journal import Setup, read
from appliance.lab.calibration.least_squares import fit_prefill, fit_steps
from appliance.lab.calibration.step_tables import Measurements
from appliance.lab.experiments.run import Contender, Setting
from appliance.lab.hardware import Box, GpuSpec, ModelProfile
from appliance.lab.noise import Deviation
from appliance.lab.replay.journal_part import JournalPart, entries
from appliance.lab.replay.output_lengths import OutputLengths
from appliance.lab.replay.overheads import ColdPrompt, Overheads
from appliance.lab.sim.recorder import ComputeSpan, Life, ModelSwitch, Recorder
from appliance.lab.sim.simulator import SimulationRun, Start
from appliance.lab.workload import Arrival
from appliance.service.policy_report import PolicyChoice, PolicyChosen
from appliance.vocabulary import (
    ClockSet,
    Command,
    Event,
    EvictModel,
    Finish,
    FinishReason,
    InstanceId,
    InstanceLost,
    InstanceUp,
    ModelAdded,
    ModelBuilt,
    ModelLoaded,
    ModelName,
    PrefillDone,
    Reject,
    RequestArrived,
    RequestId,
    RunPrefill,
    RunTurn,
    Slo,
    TokensProduced,
    TurnEnded,
)

LAYERS = 16
"""Of a model whose layers are not known; only how late a prompt is behind its load hangs on it."""

FEW = 3
"""Observations of a model from which its times are scaled to its own."""

UNUSUAL = 10.0
"""So many times what was expected: the machine stood still meanwhile."""

ENOUGH = 8
"""Observations from which a model's times are fitted to its own; with fewer, to those of all."""

GUESS = {
    "prefill_base_seconds": 0.0,
    "prefill_seconds_per_token": 0.0005,
    "prefill_seconds_per_token2": 0.0,
    "step_base_seconds": 0.005,
    "step_seconds_per_kv_token": 0.0,
    "step_seconds_per_sequence": 0.0,
}
"""The times of a model of which nothing was seen."""

UNKNOWN_BYTES_PER_SECOND = 5e9
"""The rate of a link on which nothing was ever loaded."""


@dataclass(frozen=True)
class JournalRecording:
    """The requests and the box of a journal, and what really happened."""

    setting: Setting
    happened: SimulationRun
    contender: Contender
    """The policies that decided then, each from when it was chosen."""
    measured: Mapping[ModelName, Measurements]
    """Its prompts and turns, as rows to fit times to."""
    prompts: int
    """From which it is known how long prompts take."""
    link_known: bool
    """Whether a load was seen from which the rate of the link is known."""

    def carried(self, seconds: float) -> list[Arrival]:
        """What was live at a time, as requests that came when it did: with the tokens it had by
        then as part of its prompt, and those to come as its output, each due when it was. In the
        order of time; O(tokens)."""
        recorder, known = self.happened.recorder, self.setting.profiles
        had = [0] * len(recorder.lives)
        for number, start, count in zip(
            recorder.requests, recorder.starts, recorder.counts, strict=True
        ):
            had[number] += count if start <= seconds else 0
        return [
            Arrival(
                seconds=life.arrived,
                model=life.model,
                prompt_tokens=life.prompt_tokens + had[life.number],
                output_tokens=max(1, life.output_tokens - had[life.number]),
                request_class=life.request_class,
                key=life.key,
                max_tokens=max(1, life.max_tokens - had[life.number]),
                slo=_after(life.slo, had[life.number]),
            )
            for life in recorder.lives
            if life.model in known
            and life.arrived < seconds
            and (life.ended is None or life.ended > seconds)
        ]


def recording(
    path: Path,
    learns: Callable[[float], bool] | None = None,
    part: JournalPart | None = None,
) -> JournalRecording:
    """Read a journal, or a part of it. How long anything takes is learned from all of that, or from
    what was over at times at which `learns`, of the seconds since the first request, is true.
    Raises `LabError` if there is nothing in it to replay."""
    try:
        setup, every = read(path)
        reader = _Reader(setup, learns)
        for entry in every if part is None else entries(path, part):
            reader.hear(entry.now, entry.event, entry.commands)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise LabError(f"{path}: {error}") from None
    if not reader.recorder.lives:
        raise LabError(f"{path}: there are no requests in it")
    reader.learn_cold_prompts()
    _lengthen(reader.recorder.lives)
    return JournalRecording(
        setting=reader.setting(),
        happened=reader.run(),
        measured=reader.measured,
        prompts=reader.prompts,
        link_known=reader.link_known,
        contender=replace(
            contender_of(setup.policy),
            successors=[(seconds, contender_of(choice)) for seconds, choice in reader.swaps],
        ),
    )


def _after(slo: Slo, tokens: int) -> Slo:
    """By which the tokens after these are due when they were."""
    ttft_seconds = slo.ttft_seconds + tokens * slo.tbt_seconds
    return msgspec.structs.replace(slo, ttft_seconds=ttft_seconds)


def contender_of(choice: PolicyChoice) -> Contender:
    """The policies of a box, as the lab plays them."""
    return Contender("+".join(choice.use), choice.use, choice.parameters, choice.decisions)


def _lengthen(lives: Sequence[Life]) -> None:
    """Give answers that had not ended, and those that were refused, their likely length: as other
    answers of the model, or as those of all models if too few of its own ended."""
    reasons = set(FinishReason)
    ended: defaultdict[ModelName, list[int]] = defaultdict(list)
    unended: defaultdict[ModelName, list[int]] = defaultdict(list)
    for life in lives:
        (ended if life.outcome in reasons else unended)[life.model].append(life.produced)
    if not unended:
        return
    everyones = OutputLengths(chain(*ended.values()), chain(*unended.values()))
    of = {
        model: OutputLengths(ended[model], tokens) if len(ended[model]) >= ENOUGH else everyones
        for model, tokens in unended.items()
    }
    for life in lives:
        if life.outcome not in reasons:
            likely = of[life.model].expected(life.produced)
            life.output_tokens = max(life.produced, min(life.max_tokens, likely))


@dataclass
class _Job:
    """What an instance was last ordered to compute."""

    command: RunPrefill | RunTurn
    ordered: float
    warm: bool
    produced: int = 0
    read_tokens: int = 0
    """Tokens of KV that its decoding steps read, all together."""
    decoded: int = 0
    """Tokens of those that it produced, without the first ones of prompts."""
    prompt_tokens: list[int] = field(default_factory=list)
    """Of the prompts that it computed."""
    known: bool = True
    """Whether these are all."""


class _Beside(NamedTuple):
    """A turn that computed prompts in steps that decode."""

    model: ModelName
    steps: int
    requests: float
    """Mean of those that its steps decoded."""
    kv_tokens: float
    """Mean of those that its steps read."""
    prompt_tokens: int
    prompts: int
    seconds: float


def _scaled(profile: ModelProfile, seen: Measurements, turns: Sequence[int]) -> ModelProfile:
    """The profile by which everything seen of the model would have taken as long as it did; `turns`
    are the steps of each turn. A fit by relative error is below the mean of noisy times, and one to
    other models' is anywhere."""
    prompts = _ratio((seconds, profile.prefill_seconds(tokens)) for tokens, seconds in _alone(seen))
    steps = _ratio(
        (count * seconds, count * profile.step_seconds(requests, kv_tokens))
        for count, (requests, kv_tokens, seconds) in zip(turns, seen.steps, strict=True)
    )
    changes = {}
    for name in profile.__struct_fields__:
        if "_seconds" in name:
            scale = prompts if name.startswith("prefill_") else steps
            changes[name] = scale * getattr(profile, name)
    return msgspec.structs.replace(profile, **changes)


def _alone(seen: Measurements) -> list[tuple[int, float]]:
    """Tokens and seconds of the prompts that were computed alone."""
    rows = seen.prompts
    return [(round(t), seconds) for t, squares, _, seconds in rows if squares == t * t]


def _ratios(seen: Measurements, profile: ModelProfile) -> list[float]:
    """Seconds over those expected, of all prompts and turns of which any are."""
    prompts = [(seconds, profile.prefill_seconds(tokens)) for tokens, seconds in _alone(seen)]
    turns = [
        (seconds, profile.step_seconds(requests, kv_tokens))
        for requests, kv_tokens, seconds in seen.steps
    ]
    return [seconds / expected for seconds, expected in prompts + turns if expected > 0]


def _ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Of the sums of what was and what was expected, without those where the machine stood still;
    1 if there are too few."""
    usual = [(was, expected) for was, expected in pairs if was < UNUSUAL * expected]
    if len(usual) < FEW:
        return 1.0
    return math.fsum(was for was, _ in usual) / math.fsum(expected for _, expected in usual)


class _Reader:
    """Hears the journal, entry by entry. The clock starts with the first request."""

    def __init__(self, setup: Setup, learns: Callable[[float], bool] | None) -> None:
        self._setup = setup
        self._models = {model.name: model for model in setup.models}
        """All that there ever were."""
        self._learns_at = learns
        self._overheads = Overheads()
        self.recorder = Recorder()
        self.swaps: list[tuple[float, PolicyChoice]] = []
        """When policies were changed while it ran, and to which."""
        self._lives: dict[RequestId, Life] = {}
        self._began: float | None = None
        self._clock: Start | None = None
        """What the clock on the wall showed when the machine's was at 0, as was last reported."""
        self._now = 0.0
        self._events = 0
        self._slabs = 0
        self._built: dict[ModelName, ModelBuilt] = {}
        self._loaded: set[tuple[InstanceId, ModelName]] = set()
        self._jobs: dict[InstanceId, _Job] = {}
        self._current: dict[InstanceId, ModelName] = {}
        self.measured: defaultdict[ModelName, Measurements] = defaultdict(Measurements)
        self._turns: defaultdict[ModelName, list[int]] = defaultdict(list)
        """Steps of each turn in them."""
        self._beside: defaultdict[ModelName, list[_Beside]] = defaultdict(list)
        self._cold: defaultdict[ModelName, list[tuple[float, float, float, float]]] = defaultdict(
            list
        )
        """Prompts that began before all of their weights were there, as rows of `measured`."""

    def hear(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        if self._began is None and isinstance(event, RequestArrived):
            self._began = now
        self._now = now - (now if self._began is None else self._began)
        if isinstance(event, ClockSet):
            self._clock = Start(
                unix_seconds=event.unix_seconds - now, utc_offset_seconds=event.utc_offset_seconds
            )
        self._events += 1
        self._overheads.hear(self._now, event, commands, learns=self._learns)
        self._on(event)
        for command in commands:
            self._note(command)

    @property
    def _learns(self) -> bool:
        return self._learns_at is None or self._learns_at(self._now)

    @singledispatchmethod
    def _on(self, event: Event) -> None:
        """Other events say nothing that the lab wants to know."""

    @_on.register
    def _on_request_arrived(self, event: RequestArrived) -> None:
        spec = event.request
        life = Life(
            number=len(self.recorder.lives),
            id=spec.id,
            model=spec.model,
            request_class=spec.request_class,
            slo=spec.slo,
            arrived=self._now,
            prompt_tokens=spec.prompt_tokens,
            output_tokens=0,
            max_tokens=max(1, spec.max_tokens),
            key=spec.key,
        )
        self.recorder.lives.append(life)
        self._lives[spec.id] = life

    @_on.register
    def _on_policy_chosen(self, event: PolicyChosen) -> None:
        self.swaps.append((self._now, event.choice))

    @_on.register
    def _on_model_added(self, event: ModelAdded) -> None:
        self._models[event.model.name] = event.model

    @_on.register
    def _on_instance_up(self, event: InstanceUp) -> None:
        self._slabs = max(self._slabs, event.slabs)

    @_on.register
    def _on_instance_lost(self, event: InstanceLost) -> None:
        self._loaded = {(i, m) for i, m in self._loaded if i != event.instance}
        self._jobs.pop(event.instance, None)

    @_on.register
    def _on_model_built(self, event: ModelBuilt) -> None:
        self._built.setdefault(event.model, event)

    @_on.register
    def _on_model_loaded(self, event: ModelLoaded) -> None:
        self._loaded.add((event.instance, event.model))
        self.recorder.loads += 1
        self.recorder.prefetches += event.prefetched

    @_on.register
    def _on_tokens_produced(self, event: TokensProduced) -> None:
        job = self._jobs.get(event.instance)
        for token in event.tokens:
            count = max(1, token.count)
            life = self._lives.get(token.request)
            if job is not None:
                job.produced += count
                if life is not None:
                    read = count * life.kv_tokens + count * (count - 1) // 2
                    job.read_tokens += read if life.produced else 0
                    job.decoded += count if life.produced else count - 1
                else:
                    job.known = False
            if life is not None:
                self.recorder.produced(life, self._now, 0.0, 0.0, count)
                life.output_tokens = life.produced

    @_on.register
    def _on_prefill_done(self, event: PrefillDone) -> None:
        job = self._jobs.get(event.instance)
        life = self._lives.get(event.request)
        if job is None:
            return
        if isinstance(job.command, RunTurn):
            if life is not None:
                job.prompt_tokens.append(life.kv_tokens)
            job.known &= life is not None
            return
        if life is not None and event.seconds > 0 and self._learns:
            tokens = life.kv_tokens
            row = (tokens, tokens * tokens, 1.0, event.seconds)
            rows = self.measured[event.model].prompts if job.warm else self._cold[event.model]
            rows.append(row)
        self._computed(event.instance, event.model, job, event.seconds, 0)

    @_on.register
    def _on_turn_ended(self, event: TurnEnded) -> None:
        job = self._jobs.get(event.instance)
        if job is None or isinstance(job.command, RunPrefill) or not event.steps:
            return
        # A step with drafts computes and gives more tokens than those that the lab knows.
        usual = not job.command.prompts and not event.drafted
        if usual and event.seconds > 0 and self._learns:
            steps = event.steps
            row = (job.produced / steps, job.read_tokens / steps, event.seconds / steps)
            self.measured[event.model].steps.append(row)
            self._turns[event.model].append(event.steps)
        elif not job.command.requests and event.steps == 1 and job.warm and self._learns:
            self._learn_prompts(event, job.command.prompts)
        elif job.command.prompts and not event.drafted and self._learns:
            self._learn_beside(event, job)
        self._computed(event.instance, event.model, job, event.seconds, event.steps)

    def _learn_prompts(self, event: TurnEnded, prompts: Sequence[RequestId]) -> None:
        """What prompts took that were computed together, in a step of nothing else."""
        tokens = [self._lives[name].kv_tokens for name in prompts if name in self._lives]
        if len(tokens) == len(prompts) and event.seconds > 0:  # none has ended with its first token
            row = (sum(tokens), sum([count * count for count in tokens]), 1.0, event.seconds)
            self.measured[event.model].prompts.append(row)

    def _learn_beside(self, event: TurnEnded, job: _Job) -> None:
        """A turn that decoded and computed prompts, if it is known which and how long it took, and
        it waited for no weights."""
        timed = job.warm and event.seconds > 0
        if not (timed and job.known and any(job.prompt_tokens) and job.decoded):
            return
        steps = event.steps
        self._beside[event.model].append(
            _Beside(
                model=event.model,
                steps=steps,
                requests=job.decoded / steps,
                kv_tokens=job.read_tokens / steps,
                prompt_tokens=sum(job.prompt_tokens),
                prompts=len(job.prompt_tokens),
                seconds=event.seconds,
            )
        )

    def learn_cold_prompts(self) -> None:
        """Where each request finds the weights of its model away, no other prompts were seen. They
        took no longer than that, and the lab then has them take as long as they did."""
        if self.prompts < ENOUGH:
            for model, rows in self._cold.items():
                self.measured[model].prompts += rows

    @property
    def prompts(self) -> int:
        """From which it is known how long prompts take."""
        alone = sum(len(rows.prompts) for rows in self.measured.values())
        return alone + sum(one.prompts for rows in self._beside.values() for one in rows)

    def _computed(
        self, instance: InstanceId, model: ModelName, job: _Job, seconds: float, steps: int
    ) -> None:
        if self._began is None:
            return
        command = job.command
        batch = len(command.requests) if isinstance(command, RunTurn) else 0
        prompts = len(command.prompts) if isinstance(command, RunTurn) else 1
        span = ComputeSpan(instance, model, self._now - seconds, self._now, batch, steps, prompts)
        self.recorder.computed(span, seconds)

    def _note(self, command: Command) -> None:
        match command:
            case EvictModel():
                self._loaded.discard((command.instance, command.model))
            case RunPrefill() | RunTurn():
                self._begin(command)
            case Finish() | Reject():
                life = self._lives.pop(command.request, None)
                if life is not None:
                    life.outcome = command.reason if isinstance(command, Finish) else command.code
                    life.ended = self._now

    def _begin(self, command: RunPrefill | RunTurn) -> None:
        instance, model = command.instance, command.model
        warm = (instance, model) in self._loaded
        self._jobs[instance] = _Job(command, self._now, warm)
        if self._current.get(instance) != model:
            self._current[instance] = model
            self.recorder.switches.append(ModelSwitch(instance, model, self._now, math.nan))

    @property
    def link_known(self) -> bool:
        """Whether any load tells how fast they are."""
        return self._overheads.load_bytes_per_second() is not None

    def run(self) -> SimulationRun:
        """What happened."""
        return SimulationRun(
            recorder=self.recorder,
            until=self._now,
            instances=self._setup.instances,
            events=self._events,
            preemptions=0,
        )

    def setting(self) -> Setting:
        """The same requests on the same box."""
        setup = self._setup
        served = [model for model in self._models.values() if model.name in self._built]
        if not served:
            raise LabError("no engine was built in the journal: nothing says how large models are")
        built = self._built[served[0].name]
        tp = max(1, built.host_slabs // built.weight_slabs)
        rate = self._overheads.load_bytes_per_second() or UNKNOWN_BYTES_PER_SECOND
        box = Box(
            gpu=GpuSpec(
                name="recorded",
                vram_bytes=self._slabs * setup.slab_bytes,
                pcie_bytes_per_second=rate / tp,
                efficiency=1.0,
                mapping_seconds=self._overheads.mapping_seconds(),
            ),
            instances=setup.instances,
            tp=tp,
            host_bytes=setup.host_bytes,
            pool_share=1.0,
            slab_bytes=setup.slab_bytes,
            order_seconds=self._overheads.order_seconds(),
            block_tokens=built.kv.block_tokens,
        )
        names = {model.name for model in served}
        profiles = {name: self._profile(self._built[name], tp) for name in sorted(names)}
        return Setting(
            models=served,
            box=self._with_interference(box, profiles),
            profiles=profiles,
            arrivals=[
                Arrival(
                    seconds=life.arrived,
                    model=life.model,
                    prompt_tokens=life.prompt_tokens,
                    output_tokens=max(1, life.output_tokens),
                    request_class=life.request_class,
                    key=life.key,
                    max_tokens=life.max_tokens,
                    slo=life.slo,
                )
                for life in self.recorder.lives
                if life.model in names
            ],
            seconds=self._now,
            kv_floor_slabs=setup.kv_floor_slabs,
            deviation=Deviation(noise=self._noise(profiles)),
            informed=False,
            start=self._start(),
        )

    def _start(self) -> Start | None:
        """What the clock on the wall showed at the first request, if that is known."""
        if self._clock is None or self._began is None:
            return None
        return self._clock.after(self._began)

    def _noise(self, profiles: Mapping[ModelName, ModelProfile]) -> float:
        """Coefficient of variation of what prompts and turns took, over what they should have."""
        ratios = []
        for name, seen in self.measured.items():
            if name in profiles:
                ratios += _ratios(seen, profiles[name])
        usual = [ratio for ratio in ratios if ratio < UNUSUAL]
        return statistics.pstdev(usual) if len(usual) >= ENOUGH else 0.0

    def _with_interference(self, box: Box, profiles: Mapping[ModelName, ModelProfile]) -> Box:
        tokens = {life.id: life.prompt_tokens for life in self.recorder.lives}

        def expected_seconds(prompt: ColdPrompt) -> float | None:
            if prompt.request not in tokens or prompt.model not in profiles:
                return None  # it came before the part of the journal that is read
            profile = profiles[prompt.model]
            load = profile.shard_bytes / box.gpu.link_bytes_per_second
            compute = profile.prefill_seconds(tokens[prompt.request])
            return max(compute, load + compute / profile.layers)

        seconds = self._overheads.interference_seconds(expected_seconds)
        return msgspec.structs.replace(box, interference_seconds=seconds)

    def _profile(self, built: ModelBuilt, tp: int) -> ModelProfile:
        profile = self._timed(built, tp)
        own, everyones = self.measured[built.model], _together(self.measured.values())
        if len(everyones.prompts) < ENOUGH <= len(everyones.steps):
            turns = self._beside[built.model]
            if len(turns) < ENOUGH:
                turns = [one for rows in self._beside.values() for one in rows]
            turns = [one for one in turns if one.model in self._built]
            models = {one.model for one in turns}
            decoding = {name: self._timed(self._built[name], tp) for name in models}
            profile = _with_prompts_beside(profile, turns, decoding)
        return _scaled(profile, own, self._turns[built.model])

    def _timed(self, built: ModelBuilt, tp: int) -> ModelProfile:
        """The sizes of a model, and the times fitted to its own prompts and turns, or to those of
        all; its steps take as long as they did."""
        own, everyones = self.measured[built.model], _together(self.measured.values())
        prompts = own if len(own.prompts) >= ENOUGH else everyones
        steps = own if len(own.steps) >= ENOUGH else everyones
        times = dict(GUESS)
        if len(prompts.prompts) >= ENOUGH:
            times |= fit_prefill(prompts.prompt_columns()).coefficients
        if len(steps.steps) >= ENOUGH:
            times |= fit_steps(steps.step_columns()).coefficients
        sizes = {
            "name": built.model,
            "weight_bytes": built.weight_slabs * self._setup.slab_bytes * tp,
            "layers": LAYERS,
            "hidden": 0,
            "kv_bytes_per_token": built.kv.bytes_per_token,
            "tp": tp,
            "shape": built.kv,
        }
        profile = msgspec.convert(sizes | times, ModelProfile)
        return _scaled(profile, Measurements(steps=own.steps), self._turns[built.model])


def _with_prompts_beside(
    profile: ModelProfile, turns: Sequence[_Beside], decoding: Mapping[ModelName, ModelProfile]
) -> ModelProfile:
    """The profile with prompts that cost, for each token, what these turns took longer than their
    decoding, and a step alone; as it is if there are too few, or they took no longer. `decoding`
    are the profiles of their models: of one that is slower by some factor, a token is expected to
    be slower by that, too. Sums are compared, not turns: of one turn most is decoding, and varies
    more than its prompts take. Turns in which the machine stood still are left out."""
    rows = []
    for one in turns:
        theirs = one.steps * decoding[one.model].step_seconds(one.requests, one.kv_tokens)
        mine = one.steps * profile.step_seconds(one.requests, one.kv_tokens)
        if theirs > 0:
            rows.append((one.prompt_tokens, mine, one.seconds * mine / theirs))
    if len(rows) < ENOUGH:
        return profile
    middle = max(0.0, statistics.median((took - steps) / tokens for tokens, steps, took in rows))
    usual = [row for row in rows if row[2] < UNUSUAL * (row[1] + middle * row[0])]
    longer = math.fsum(took - steps for _, steps, took in usual)
    if len(usual) < ENOUGH or longer <= 0:
        return profile
    return msgspec.structs.replace(
        profile,
        prefill_base_seconds=profile.step_seconds(0, 0),
        prefill_seconds_per_token=longer / sum(tokens for tokens, _, _ in usual),
        prefill_seconds_per_token2=0.0,
    )


def _together(all_models: Iterable[Measurements]) -> Measurements:
    together = Measurements()
    for some in list(all_models):
        together.prompts += some.prompts
        together.steps += some.steps
    return together
