"""Plays the papers' tables in the lab and writes them to `benchmarks/RESULTS.md`.

    python -m benchmarks.papers [--quick] [--only NAME …] [--again [POLICY …]] [--jobs N]

Each file of `benchmarks/papers/` is a table of a paper; what came of its cells is in
`benchmarks/results/papers/NAME.json`. A cell that is there already, for the same scenario, is not
played again; ``--again`` plays all, or those of the policies it names, whose code has changed.
``--quick`` plays the few that are marked for it, writes nothing and fails if any figure is not the
committed one: runs are deterministic.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence

import msgspec

from appliance.lab.experiments.comparison import Match, MatchPool
from appliance.lab.experiments.sweep import Search, search
from benchmarks import papers_computed, papers_report
from benchmarks.papers_tables import (
    RESULTS,
    TABLES,
    Cell,
    Cells,
    PaperTable,
    digest,
    names,
    read,
)


class Wanted(msgspec.Struct, frozen=True):
    """A cell to play."""

    at: float
    policy: str
    seed: int


def play(table: PaperTable, wanted: Sequence[Wanted], arena: MatchPool) -> list[Cell]:
    """The cells, in the order asked for."""
    digests = {
        (one.at, one.policy): digest(table, table.point(one.at), one.policy) for one in wanted
    }
    if table.computed is not None:
        compute = papers_computed.FUNCTIONS[table.computed]
        return [
            Cell(
                at=one.at,
                policy=one.policy,
                seed=one.seed,
                digest=digests[one.at, one.policy],
                metrics=compute(one.policy, one.at, one.seed),
            )
            for one in wanted
        ]
    matches = []
    for one in wanted:
        point = table.point(one.at)
        path = str(table.path(point))
        changes = table.changes(point)
        matches.append(Match(path=path, policy=one.policy, seed=one.seed, changes=changes))
    outcomes = arena.play(matches, lambda: print(".", end="", flush=True))
    kept = table.kept()
    return [
        Cell(
            at=one.at,
            policy=one.policy,
            seed=one.seed,
            digest=digests[one.at, one.policy],
            metrics={
                # A count is written as it is read again: as a float.
                name: None if math.isnan(outcome.metrics[name]) else float(outcome.metrics[name])
                for name in kept
            },
            faults=outcome.faults,
        )
        for one, outcome in zip(wanted, outcomes, strict=True)
    ]


class Sheet:
    """A table that is being filled in; it is on disk after every few cells."""

    def __init__(self, name: str, arena: MatchPool, batch: int, again: Sequence[str] = ()) -> None:
        """Cells of the policies `again` are played whether they are known or not."""
        self.table = read(TABLES / f"{name}.toml")
        self._path = RESULTS / f"{name}.json"
        self._arena, self._batch = arena, batch
        self.cells = Cells.read(self._path)
        self.cells.keep(self.table)
        self.cells.drop(again)

    def fill(self) -> None:
        """Its points, then what its search comes to."""
        self.need(
            Wanted(point.at, policy, 0)
            for point in self.table.points
            for policy in self.table.played(point)
        )
        if self.table.search is not None:
            self._search()
        self.cells.write(self._path)

    def need(self, wanted: Iterable[Wanted]) -> None:
        """Play these with every seed, but for those that are known."""
        every = [msgspec.structs.replace(w, seed=s) for w in wanted for s in self.table.seeds]
        lacking = [one for one in every if not self._known(one)]
        for begin in range(0, len(lacking), self._batch):
            some = lacking[begin : begin + self._batch]
            for cell in play(self.table, some, self._arena):
                self.cells.put(cell)
            self.cells.write(self._path)

    def _known(self, one: Wanted) -> bool:
        cell = self.cells.get(one.at, one.policy, one.seed)
        if cell is None:
            return False
        return self.table.computed is not None or set(self.table.kept()) <= set(cell.metrics)

    def _search(self) -> None:
        """All policies at once, so that every processor has something to do."""
        asked, knee = self.table.search, self.table.knee
        assert asked is not None
        assert knee is not None, "a search is for the table's knee"
        metric = knee.metric or self.table.metrics[0]
        start, most = round(asked.start / asked.step), round(asked.most / asked.step)
        searches: dict[str, Search] = {
            policy: search(start, most, knee.target) for policy in self.table.policies
        }
        steps = {policy: next(one) for policy, one in searches.items()}
        while steps:
            loads = {policy: round(count * asked.step, 6) for policy, count in steps.items()}
            self.need(Wanted(at, policy, 0) for policy, at in loads.items())
            for policy, at in loads.items():
                try:
                    steps[policy] = searches[policy].send(self.cells.value(at, policy, metric))
                except StopIteration:
                    del steps[policy]


def check(name: str, arena: MatchPool) -> tuple[int, list[str]]:
    """Play the table's quick cells: how many, and those that are not as committed."""
    table = read(TABLES / f"{name}.toml")
    committed = Cells.read(RESULTS / f"{name}.json")
    wanted = [
        Wanted(point.at, policy, table.seeds[0])
        for point in table.points
        if point.quick
        for policy in table.played(point)
    ]
    wrong = []
    for one, cell in zip(wanted, play(table, wanted, arena), strict=True):
        expected = committed.get(one.at, one.policy, one.seed)
        if expected is None:
            wrong.append(f"{name}: {one.policy} at {one.at:g}: there is no committed cell")
            continue
        if expected.digest != cell.digest:
            wrong.append(f"{name}: {one.policy} at {one.at:g}: the scenario is another one")
        for metric, value in cell.metrics.items():
            if metric in expected.metrics and expected.metrics[metric] != value:
                wrong.append(
                    f"{name}: {one.policy} at {one.at:g}: {metric} is {value},"
                    f" committed was {expected.metrics[metric]}"
                )
    return len(wanted), wrong


def _quick(chosen: Sequence[str], arena: MatchPool) -> int:
    played, wrong = 0, []
    for name in chosen:
        count, found = check(name, arena)
        played += count
        wrong += found
    print()
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        print("If that is meant to be so: make results, and commit what it writes", file=sys.stderr)
        return 1
    print(f"{played} cells of the papers' tables are as committed")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--again", nargs="*", metavar="POLICY", help="all if none is named")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    chosen = given.only or names()
    with MatchPool(given.jobs) as arena:
        if given.quick:
            return _quick(chosen, arena)
        for name in chosen:
            began = time.monotonic()
            print(name, end=" ", flush=True)
            again = (
                () if given.again is None else given.again or read(TABLES / f"{name}.toml").policies
            )
            Sheet(name, arena, 2 * given.jobs, again).fill()
            print(f" {time.monotonic() - began:.0f} s")
    papers_report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
