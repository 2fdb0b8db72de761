"""What a paper's table is here: a TOML file of `benchmarks/papers/`, and the cells that came of it.

The file names a figure of a paper, the scenario that runs it, the policies and the points of its x
axis, and what the paper says of them (claims). A cell is one policy at one point with one seed.
`benchmarks/papers.py` makes cells, `benchmarks/papers_report.py` writes them down.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.errors import LabError
from appliance.lab import hardware
from appliance.lab.experiments import scenario
from appliance.lab.experiments.report import mean

HERE = Path(__file__).parent
TABLES = HERE / "papers"
SCENARIOS = HERE / "scenarios"
RESULTS = HERE / "results/papers"

NOTABLE = 0.15
"""A difference above this has a sentence."""

KEPT = (
    "token_attainment",
    "time_attainment",
    "ttft_attainment",
    "tpot_attainment",
    "request_attainment",
    "busy_share",
    "requests",
    "rejected",
    "switches",
)
"""Metrics that every cell has; beside them, those its table shows."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class Point(Section, frozen=True, kw_only=True):
    """A place on the x axis. `set` changes the scenario, as ``--set`` does."""

    at: float
    set: Mapping[str, str | int | float | bool] = {}
    scenario: str | None = None
    """Instead of the table's."""
    policies: tuple[str, ...] = ()
    """Who is played there; all of the table if it is not given."""
    quick: bool = False
    """Whether `make results-quick` plays it."""


class Knee(Section, frozen=True, kw_only=True):
    """Where on the x axis a metric crosses `target`, by linear interpolation between points."""

    target: float
    metric: str | None = None
    """Of this only; of each that the table shows if it is not given."""
    sense: Literal["largest", "smallest"] = "largest"
    """Largest x that still attains it, or the smallest that does."""
    per: float = 1.0
    """It is told divided by this (GPUs, say)."""


class Search(Section, frozen=True, kw_only=True):
    """Points that are found by bisection for the table's knee: `set` is the key that is x."""

    set: str
    start: Annotated[float, Meta(gt=0)]
    step: Annotated[float, Meta(gt=0)]
    most: Annotated[float, Meta(gt=0)]
    lasts: float | None = None
    """Seconds of the trace: played x times as fast it, and the run, are over so much sooner;"""
    tail: float = 0.0
    """but the run so many seconds later, for the deadlines of who came last."""


class Claim(Section, frozen=True, kw_only=True):
    """A figure of the paper: of a policy at a point, else at the knee; perhaps over another's."""

    what: str
    policy: str
    at: float | None = None
    metric: str | None = None
    over: str | None = None
    """The policy whose figure divides it."""
    over_at: float | None = None
    """The point of that one, if not `at`."""
    paper: float | None = None
    least: float | None = None
    most: float | None = None
    """The paper says a figure, or no less, or no more than one."""
    why: str = ""
    """The sentence on a difference."""


class PaperTable(Section, frozen=True, kw_only=True):
    """The whole file."""

    title: str
    source: str
    """Paper, figure or table, section."""
    says: str
    """What the paper shows there."""
    axis: str
    """What the x axis counts."""
    metrics: Annotated[tuple[str, ...], Meta(min_length=1)]
    policies: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Of the scenario, or installed; of a computed table its rows."""
    scenario: str | None = None
    """In `benchmarks/scenarios/`."""
    computed: str | None = None
    """Instead of a scenario: a function of `benchmarks/papers_computed.py`."""
    set: Mapping[str, str | int | float | bool] = {}
    """At every point."""
    seeds: tuple[int, ...] = (1,)
    points: tuple[Point, ...] = ()
    search: Search | None = None
    knee: Knee | None = None
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    """Paragraphs under the table."""

    def point(self, at: float) -> Point:
        """One of the file's, or one that a search comes to."""
        for point in self.points:
            if point.at == at:
                return point
        if self.search is None:
            raise LabError(f"{self.title}: there is no point {at:g}")
        load = int(at) if at.is_integer() else at  # a count is a whole number in TOML
        changes: dict[str, str | int | float | bool] = {self.search.set: load}
        if self.search.lasts is not None:
            changes["duration"] = f"{self.search.lasts / at + self.search.tail:.3f}s"
        return Point(at=at, set=changes)

    def played(self, point: Point) -> Sequence[str]:
        """The policies that have cells there."""
        return point.policies or self.policies

    def changes(self, point: Point) -> dict[str, str]:
        """What of the scenario is different there."""
        return {key: _text(value) for key, value in {**self.set, **point.set}.items()}

    def path(self, point: Point) -> Path:
        """The scenario that is played there."""
        name = point.scenario or self.scenario
        if name is None:
            raise LabError(f"{self.title}: give a scenario, or what computes it")
        return SCENARIOS / name

    def kept(self) -> list[str]:
        """Metrics that its cells have."""
        named = [*KEPT, *self.metrics, *(claim.metric for claim in self.claims if claim.metric)]
        if self.knee is not None and self.knee.metric is not None:
            named.append(self.knee.metric)
        return list(dict.fromkeys(named))


def _text(value: str | int | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(path: Path) -> PaperTable:
    """A file of `benchmarks/papers/`. Raises `LabError` for what is wrong with it."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(document, PaperTable)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise LabError(f"{path}: {error}") from None


def names() -> list[str]:
    """Of all tables there are, in the order of the document."""
    return sorted(path.stem for path in TABLES.glob("*.toml"))


class Cell(Section, frozen=True, kw_only=True):
    """A policy at a point with a seed, and what was measured; null where there was nothing to."""

    at: float
    policy: str
    seed: int
    digest: str
    """Of the scenario as it was played; `digest` makes it."""
    metrics: Mapping[str, float | None]
    faults: int = 0
    """Questions that the policy could not answer."""

    def value(self, metric: str) -> float:
        value = self.metrics.get(metric)
        return math.nan if value is None else value


def digest(table: PaperTable, point: Point, policy: str) -> str:
    """Of all that the scenario says of this cell, of the hardware and the models that it names, and
    of the files it reads. Not of the code."""
    if table.computed is not None:
        given: Any = {"computed": table.computed, "set": table.changes(point), "row": policy}
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]
    path = table.path(point)
    chosen = scenario.read(path, table.changes(point))
    given = _given(chosen)
    box = chosen.hardware.box()
    given["gpu"] = _given(box.gpu)
    if not chosen.hardware.data_sheet:
        given["gpu"].pop("bf16_flops", None)  # only times from data sheets follow from it
    own = {profile.name for profile in chosen.profiles}
    used = {name for models in chosen.models for name in models.mix} - own
    given["profiles"] = {
        name: _given(hardware.profile(name, chosen.hardware.gpu, chosen.hardware.tp))
        for name in sorted(used)
    }
    for key in ("title", "about", "seeds", "policies"):
        given.pop(key, None)
    stack = chosen.policies.get(policy)
    given["policy"] = {"use": [policy]} if stack is None else {"use": [policy]} | _given(stack)
    found = hashlib.sha256(json.dumps(given, sort_keys=True).encode())
    lengths = (models.lengths for models in chosen.models)
    for name in (chosen.arrivals.trace, chosen.arrivals.lengths, *lengths):
        if name is not None:
            found.update((path.parent / name).read_bytes())
    return found.hexdigest()[:16]


def _given(value: Any) -> Any:
    """What is not as it would be anyway, so that a new key of the lab changes no digest."""
    if isinstance(value, msgspec.Struct):
        told = {}
        for field in msgspec.structs.fields(value):
            made = field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory() if made else field.default
            if getattr(value, field.name) != default:
                told[field.name] = _given(getattr(value, field.name))
        return told
    if isinstance(value, Mapping):
        return {str(key): _given(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_given(item) for item in value]
    return value


def belongs(table: PaperTable, cell: Cell) -> bool:
    """Whether it is one of the table's, and of the scenario as it stands."""
    points = [point for point in table.points if point.at == cell.at]
    if not points and table.search is not None:
        points = [table.point(cell.at)]
    return any(
        cell.policy in table.played(point)
        and cell.seed in table.seeds
        and cell.digest == digest(table, point, cell.policy)
        for point in points
    )


class Cells:
    """The cells of a table by point, policy and seed, and their file."""

    def __init__(self, cells: Sequence[Cell] = ()) -> None:
        self._cells = {(cell.at, cell.policy, cell.seed): cell for cell in cells}

    @classmethod
    def read(cls, path: Path) -> Cells:
        """Of a file that need not be there."""
        if not path.exists():
            return cls()
        return cls(msgspec.json.decode(path.read_bytes(), type=list[Cell]))

    def write(self, path: Path) -> None:
        """A line for each, in one order."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [msgspec.json.encode(self._cells[key]).decode() for key in sorted(self._cells)]
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")

    def get(self, at: float, policy: str, seed: int) -> Cell | None:
        return self._cells.get((at, policy, seed))

    def put(self, cell: Cell) -> None:
        self._cells[cell.at, cell.policy, cell.seed] = cell

    def keep(self, table: PaperTable) -> None:
        """Drop what the table does not ask for as it stands: its curves are through all cells."""
        self._cells = {key: cell for key, cell in self._cells.items() if belongs(table, cell)}

    def drop(self, policies: Sequence[str]) -> None:
        self._cells = {key: cell for key, cell in self._cells.items() if key[1] not in policies}

    def all(self) -> list[Cell]:
        return [self._cells[key] for key in sorted(self._cells)]

    def points(self, policy: str) -> list[float]:
        """Where this policy was played."""
        return sorted({at for at, name, _ in self._cells if name == policy})

    def value(self, at: float, policy: str, metric: str) -> float:
        """The mean over the seeds; NaN if it was not played."""
        found = [c for (x, name, _), c in self._cells.items() if x == at and name == policy]
        return mean(cell.value(metric) for cell in found)


Bound = Literal["", "≥", ">", "≤", "<"]
TURNED: Mapping[Bound, Bound] = {"": "", "≥": "≤", ">": "<", "≤": "≥", "<": ">"}


class Figure(msgspec.Struct, frozen=True):
    """A number, or a bound of one: the axis ended before the knee."""

    value: float
    bound: Bound = ""

    @property
    def least(self) -> float:
        """What it is at least."""
        return -math.inf if self.bound in ("≤", "<") else self.value

    @property
    def most(self) -> float:
        """What it is at most."""
        return math.inf if self.bound in ("≥", ">") else self.value

    def over(self, other: Figure) -> Figure:
        """The quotient, which is a bound where one of them is; NaN where both are apart."""
        turned = TURNED[other.bound]
        if self.bound and turned and (self.bound in "≥>") != (turned in "≥>"):
            return Figure(math.nan)
        quotient = self.value / other.value if other.value else math.nan
        return Figure(quotient, self.bound or turned)


def knee(table: PaperTable, cells: Cells, policy: str, metric: str) -> Figure:
    """Where the policy's curve crosses the table's target; the first time, from the easy side."""
    asked = table.knee
    if asked is None:
        raise LabError(f"{table.title}: a claim without a point needs a knee")
    points = cells.points(policy)
    largest = asked.sense == "largest"
    if not largest:
        points.reverse()
    good: float | None = None
    for at in points:
        value = cells.value(at, policy, metric)
        if not value >= asked.target:
            if good is None:
                return Figure(at / asked.per, "<" if largest else ">")
            before = cells.value(good, policy, metric)
            share = (before - asked.target) / (before - value)
            return Figure((good + share * (at - good)) / asked.per)
        good = at
    if good is None:
        return Figure(math.nan)
    return Figure(good / asked.per, "≥" if largest else "≤")


def claimed(table: PaperTable, cells: Cells, claim: Claim) -> Figure:
    """Our figure for a claim."""

    metric = claim.metric or table.metrics[0]
    if claim.metric is None and claim.at is None and table.knee is not None:
        metric = table.knee.metric or metric

    def figure(policy: str, at: float | None) -> Figure:
        if at is None:
            return knee(table, cells, policy, metric)
        return Figure(cells.value(at, policy, metric))

    ours = figure(claim.policy, claim.at)
    if claim.over is None:
        return ours
    return ours.over(figure(claim.over, claim.at if claim.over_at is None else claim.over_at))


def difference(claim: Claim, ours: Figure) -> float:
    """Ours over the paper's, less 1, or what it is at least or at most if ours is a bound; 0 within
    what the paper says. NaN if there is no figure, or a bound that does not decide."""
    least = claim.paper if claim.paper is not None else claim.least
    most = claim.paper if claim.paper is not None else claim.most
    if math.isnan(ours.value):
        return math.nan
    if least is not None and ours.most < least:
        return ours.most / least - 1
    if most is not None and ours.least > most:
        return ours.least / most - 1
    within = (least is None or ours.least >= least) and (most is None or ours.most <= most)
    return 0.0 if within else math.nan
