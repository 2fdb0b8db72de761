"""The papers' tables: how cells are made, kept and compared; the document is up to date."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from appliance.errors import LabError
from appliance.lab.experiments import scenario
from appliance.lab.experiments.comparison import MatchPool
from benchmarks import papers, papers_report, papers_tables
from benchmarks.papers_tables import (
    NOTABLE,
    RESULTS,
    TABLES,
    Cell,
    Cells,
    Claim,
    Figure,
    Knee,
    PaperTable,
    belongs,
    claimed,
    difference,
    digest,
    knee,
    names,
    read,
)

SCENARIO = """
title = "Two models"
duration = "20s"

[hardware]
gpu = "H800"
count = 1
host_cache = "128GiB"

[slo]
ttft = "10s"
tbt = "100ms"

[[models]]
count = 2
mix = ["Qwen2.5-7B"]
context = 4096

[arrivals]
rate = 0.5
lengths = "lengths.csv"

[policies.appliance]
[policies.aegaeon]
"""

TABLE = """
title = "A table"
source = "A paper, Fig. 1"
says = "what it says"
scenario = "small.toml"
axis = "models"
metrics = ["token_attainment"]
policies = ["appliance"]

[[points]]
at = 2
set = { "models.0.count" = 2 }
quick = true

[[points]]
at = 4
set = { "models.0.count" = 4 }
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one table, its scenario and no results, instead of the repository's."""
    (tmp_path / "small.toml").write_text(SCENARIO)
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n100,20\n200,40\n")
    (tmp_path / "one.toml").write_text(TABLE)
    monkeypatch.setattr(papers_tables, "SCENARIOS", tmp_path)
    monkeypatch.setattr(papers, "TABLES", tmp_path)
    monkeypatch.setattr(papers, "RESULTS", tmp_path)
    return tmp_path


def fill(name: str = "one", again: Sequence[str] = ()) -> Cells:
    with MatchPool(1) as arena:
        sheet = papers.Sheet(name, arena, 1, again)
        sheet.fill()
    return sheet.cells


def made(**changes: object) -> PaperTable:
    given: dict[str, object] = {
        "title": "A table",
        "source": "A paper",
        "says": "",
        "axis": "models",
        "metrics": ("m",),
        "policies": ("a", "b"),
    }
    return PaperTable(**{**given, **changes})  # type: ignore[arg-type]


def curve(policy: str, *values: float) -> list[Cell]:
    """At 10, 20, 30 …"""
    return [
        Cell(at=10.0 * place, policy=policy, seed=1, digest="", metrics={"m": value})
        for place, value in enumerate(values, start=1)
    ]


def test_the_document_is_what_the_cells_make() -> None:
    """`make results` would change nothing in benchmarks/RESULTS.md."""
    document = papers_report.DOCUMENT.read_text(encoding="utf-8")
    assert papers_report.placed(document, papers_report.section()) == document


@pytest.mark.parametrize("name", names())
def test_a_committed_table_is_whole(name: str) -> None:
    """Every cell of it is there and of the scenario as it stands; it names its source."""
    table = read(TABLES / f"{name}.toml")
    cells = Cells.read(RESULTS / f"{name}.json")
    assert table.source
    for point in table.points:
        for policy in table.played(point):
            expected = digest(table, point, policy)
            found = [cells.get(point.at, policy, seed) for seed in table.seeds]
            assert [cell and cell.digest for cell in found] == [expected] * len(found)
    if table.search is not None:
        assert {cell.policy for cell in cells.all()} == set(table.policies)
    assert [cell for cell in cells.all() if not belongs(table, cell)] == []
    if table.computed is None:
        for point in table.points:
            chosen = scenario.read(table.path(point), table.changes(point))
            assert chosen.arrivals.trace is None or len(table.seeds) == 1


@pytest.mark.parametrize("name", names())
def test_a_difference_has_its_sentence(name: str) -> None:
    """A claim that we miss by more than 15 % says why."""
    table = read(TABLES / f"{name}.toml")
    cells = Cells.read(RESULTS / f"{name}.json")
    for claim in table.claims:
        ours = claimed(table, cells, claim)
        apart = difference(claim, ours)
        assert claim.why or math.isnan(apart) or abs(apart) <= NOTABLE, claim.what


def test_known_cells_are_not_played_again(library: Path) -> None:
    """What is on disk for the same scenario stays; another point or scenario is played."""
    first = fill()
    assert [cell.at for cell in first.all()] == [2.0, 4.0]
    stamped = (library / "one.json").read_text().replace('"requests":', '"requests":1000')
    (library / "one.json").write_text(stamped)
    assert all(cell.value("requests") > 1000 for cell in fill(again=["aegaeon"]).all())
    assert all(cell.value("requests") < 1000 for cell in fill(again=["appliance"]).all())
    (library / "one.json").write_text(stamped)
    (library / "one.toml").write_text(TABLE.replace('"models.0.count" = 4', '"arrivals.rate" = 1'))
    small, large = fill().all()
    assert small.value("requests") > 1000 > large.value("requests")


def test_other_policies_and_words_leave_a_digest_alone(library: Path) -> None:
    """Only what a cell is made of is in its digest: not the title, not other policies."""
    table = read(library / "one.toml")
    point = table.points[0]
    before = digest(table, point, "appliance")
    path = library / "small.toml"
    path.write_text(SCENARIO.replace("Two models", "Two").replace("[policies.aegaeon]", ""))
    assert digest(table, point, "appliance") == before
    assert digest(table, point, "aegaeon") != before
    path.write_text(SCENARIO.replace('"20s"', '"21s"'))
    assert digest(table, point, "appliance") != before
    path.write_text(SCENARIO)
    (library / "lengths.csv").write_text("prompt_tokens,output_tokens\n100,20\n")
    assert digest(table, point, "appliance") != before


def test_quick_finds_a_changed_figure(library: Path) -> None:
    """A committed figure that a run does not give again is named; only quick points are played."""
    fill()
    with MatchPool(1) as arena:
        assert papers.check("one", arena) == (1, [])
        text = (library / "one.json").read_text()
        (library / "one.json").write_text(text.replace('"requests":', '"requests":1'))
        played, wrong = papers.check("one", arena)
        (library / "one.json").unlink()
        assert papers.check("one", arena)[1] == ["one: appliance at 2: there is no committed cell"]
    assert played == 1
    assert len(wrong) == 1
    assert "requests is" in wrong[0]


def test_a_search_brackets_the_knee(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bisection leaves a load that is enough and, a step above it, one that is not; policies are
    searched together, a load of each at a time."""
    searched = TABLE.partition("[[points]]")[0].replace('["appliance"]', '["aegaeon", "appliance"]')
    (library / "one.toml").write_text(
        searched
        + 'search = { set = "arrivals.rate_scale", start = 8, step = 2, most = 400 }\n'
        + "knee = { target = 0.9 }\n"
    )
    asked = []

    def pretend(table: PaperTable, wanted: list[papers.Wanted], arena: MatchPool) -> list[Cell]:
        asked.append([one.policy for one in wanted])
        enough = {"aegaeon": 50, "appliance": 107}
        metrics = dict.fromkeys(table.kept(), 0.0)
        return [
            Cell(
                at=one.at,
                policy=one.policy,
                seed=one.seed,
                digest=digest(table, table.point(one.at), one.policy),
                metrics=metrics | {"token_attainment": float(one.at <= enough[one.policy])},
            )
            for one in wanted
        ]

    monkeypatch.setattr(papers, "play", pretend)
    with MatchPool(1) as arena:
        sheet = papers.Sheet("one", arena, 2)
        sheet.fill()
    found = {
        policy: knee(sheet.table, sheet.cells, policy, "token_attainment")
        for policy in sheet.table.policies
    }
    assert 50 <= found["aegaeon"].value < 52
    assert 106 <= found["appliance"].value < 108
    assert asked[0] == ["aegaeon", "appliance"]
    assert len(asked) < 12


def test_a_knee_is_between_two_points_or_a_bound() -> None:
    """It is interpolated; an axis that ends before it, or begins after it, makes it a bound."""
    table = made(knee=Knee(target=0.9))
    cells = Cells([*curve("a", 1.0, 0.95, 0.85, 0.97), *curve("b", 0.99, 0.9), *curve("c", 0.5)])
    assert knee(table, cells, "a", "m") == Figure(pytest.approx(25.0))
    assert knee(table, cells, "b", "m") == Figure(20.0, "≥")
    assert knee(table, cells, "c", "m") == Figure(10.0, "<")
    assert math.isnan(knee(table, cells, "d", "m").value)


def test_a_knee_may_be_the_smallest() -> None:
    """Of GPUs, say: from the large end down to the last point that still attains it."""
    table = made(knee=Knee(target=0.9, sense="smallest", per=10))
    cells = Cells([*curve("a", 0.1, 0.8, 1.0), *curve("b", 0.9, 0.95), *curve("c", 0.5, 0.6)])
    assert knee(table, cells, "a", "m") == Figure(pytest.approx(2.5))
    assert knee(table, cells, "b", "m") == Figure(1.0, "≤")
    assert knee(table, cells, "c", "m") == Figure(2.0, ">")


def test_claims_are_quotients_with_their_bounds() -> None:
    """A quotient of a bound is a bound, and nothing at all where both are apart."""
    table = made(knee=Knee(target=0.9))
    cells = Cells([*curve("a", 1.0, 1.0), *curve("b", 1.0, 0.8), *curve("c", 0.5)])
    assert claimed(table, cells, Claim(what="", policy="a", over="b")).bound == "≥"
    assert claimed(table, cells, Claim(what="", policy="b", over="a")).bound == "≤"
    assert math.isnan(claimed(table, cells, Claim(what="", policy="a", over="a")).value)
    assert claimed(table, cells, Claim(what="", policy="c", over="c")).bound == ""
    at_20 = Claim(what="", policy="b", at=20, over="a", over_at=10)
    assert claimed(table, cells, at_20) == Figure(0.8)


@pytest.mark.parametrize(
    ("said", "ours", "apart"),
    [
        ({"paper": 2.0}, Figure(2.5), 0.25),
        ({"least": 2.0}, Figure(2.5), 0.0),
        ({"least": 2.0}, Figure(1.0), -0.5),
        ({"least": 2.0, "most": 2.5}, Figure(5.0), 1.0),
        ({"least": 2.0}, Figure(2.0, "≥"), 0.0),
        ({"least": 2.0}, Figure(1.0, "≥"), math.nan),
        ({"least": 2.0}, Figure(1.0, "<"), -0.5),
        ({"most": 2.0}, Figure(3.0, ">"), 0.5),
        ({"most": 2.0}, Figure(1.0, "≥"), math.nan),
        ({"paper": 2.0}, Figure(2.0, ">"), math.nan),
        ({"paper": 2.0}, Figure(2.5, "≥"), 0.25),
        ({"paper": 2.0}, Figure(math.nan), math.nan),
    ],
)
def test_difference_is_to_what_the_paper_says(
    said: dict[str, float], ours: Figure, apart: float
) -> None:
    """To a figure, or to the nearer end of what it allows; a bound decides only what it does."""
    found = difference(Claim(what="", policy="a", **said), ours)
    assert found == pytest.approx(apart, nan_ok=True)


def test_cells_of_another_time_are_dropped(library: Path) -> None:
    """A point or a seed that the table no longer has would bend its curves."""
    cells = fill()
    alien = [
        msgspec.structs.replace(cells.all()[0], at=3.0),
        msgspec.structs.replace(cells.all()[0], seed=9),
        msgspec.structs.replace(cells.all()[1], policy="qlm"),
    ]
    for cell in alien:
        cells.put(cell)
    cells.write(library / "one.json")
    assert [(cell.at, cell.seed, cell.policy) for cell in fill().all()] == [
        (2.0, 1, "appliance"),
        (4.0, 1, "appliance"),
    ]


def test_a_table_is_read_strictly(library: Path) -> None:
    """A key that is not known is an error with the file's name."""
    (library / "one.toml").write_text(TABLE + "speed = 3\n")
    with pytest.raises(LabError, match=r"one\.toml"):
        read(library / "one.toml")
