"""All views agree on how many requests run and wait, and so do the API and the command line."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import msgspec
from click.testing import CliRunner
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from appliance.access.auth import Access
from appliance.api.admin.watch import state_of
from appliance.api.key_view import gated
from appliance.cli.main import cli
from appliance.daemon.status import phase_of
from appliance.scheduling.lifecycle import Stage
from appliance.service import interface
from appliance.service.interface import (
    Activity,
    ModelActivity,
    ModelTerms,
    Readiness,
    RequestActivity,
    Snapshot,
)
from appliance.vocabulary import RequestClass, Slo
from tests.unit.tui.bench import NOW, Told, command, dashboard, screen, settle, state
from tui import counts

MODELS = ("a", "b", "c")
STAGES = [stage for stage in Stage if stage is not Stage.DONE]


def request(number: int, model: str, phase: str) -> RequestActivity:
    return RequestActivity(
        id=f"r{number}", model=model, request_class=RequestClass.INTERACTIVE, phase=phase,
        age_seconds=float(number), prompt_tokens=1, output_tokens=0, max_tokens=9,
    )  # fmt: skip


def snapshot(live: list[RequestActivity], queued: list[RequestActivity]) -> Snapshot:
    """What the API has of a daemon with live requests and of keys whose requests wait."""

    def of(model: str, *, running: bool) -> int:
        mine = [one for one in live if one.model == model]
        return sum((one.phase in interface.COMPUTED_PHASES) is running for one in mine)

    models = tuple(
        ModelActivity(
            model=model, state="loaded", running=of(model, running=True),
            waiting=of(model, running=False),
            terms=ModelTerms(slo=Slo(ttft_seconds=1.0, tbt_seconds=1.0),
                             batch_slo=Slo(ttft_seconds=1.0, tbt_seconds=1.0), max_queue=9,
                             pinned=False),
        )
        for model in MODELS
    )  # fmt: skip
    service = SimpleNamespace(
        snapshot=lambda: Snapshot(
            unix_seconds=NOW, newest_event=1, readiness=Readiness(ok=True),
            status=Activity(version="1", uptime_seconds=9.0, instances=(), models=models),
            requests=tuple(live),
        )
    )  # fmt: skip
    admission = SimpleNamespace(waiting=lambda: queued)
    return gated(service, Access(None), admission).snapshot()  # type: ignore[arg-type]


REQUESTS = st.lists(
    st.tuples(st.sampled_from(MODELS), st.none() | st.sampled_from(STAGES)), max_size=20
)
"""A request without a stage waits for the turn of its key."""


def made(rows: list[tuple[str, Stage | None]]) -> Snapshot:
    live = [request(n, m, phase_of(s)) for n, (m, s) in enumerate(rows) if s is not None]
    queued = [request(n, m, "waiting") for n, (m, s) in enumerate(rows) if s is None]
    return snapshot(live, queued)


def test_both_sides_mean_the_same() -> None:
    assert counts.COMPUTED_PHASES == interface.COMPUTED_PHASES
    assert {phase_of(stage) for stage in STAGES} >= counts.COMPUTED_PHASES


@given(REQUESTS)
@settings(max_examples=8, phases=[Phase.generate])
def test_all_views_agree(rows: list[tuple[str, Stage | None]]) -> None:
    """The first line, the overview, the models, the requests."""
    found = made(rows)
    running = sum(stage in (Stage.RUNNING, Stage.PREFILLING) for _, stage in rows)
    waiting = len(rows) - running

    async def look() -> None:
        tree = state_of(found, {})
        async with dashboard(Told(state(tree)), size=(160, 48)) as app:
            header, _, overview = screen(app)[:3]
            words = f"{running} running", f"{waiting} waiting"
            assert all(text in header for text in words)
            assert all(text in " ".join(overview.split()) for text in words)
            assert _models(screen(app)) == (running, waiting)
            await command(app, "models")
            await settle(app)
            assert _models(screen(app)) == (running, waiting)
            await command(app, "requests")
            await settle(app)
            assert f"({len(rows)})" in screen(app)[1]
            phases = [line.split()[1] for line in screen(app)[3 : 3 + len(rows)]]
            assert sum(phase in counts.COMPUTED_PHASES for phase in phases) == running

    asyncio.run(look())


def _models(lines: list[str]) -> tuple[int, int]:
    """The sums of the columns RUN and WAIT."""
    rows = [line.split() for line in lines if re.match(r"\W*[abc]\s+loaded\s", line)]
    assert len(rows) == len(MODELS)
    return sum(int(row[2]) for row in rows), sum(int(row[3]) for row in rows)


@given(REQUESTS)
@settings(max_examples=20)
def test_the_command_line_agrees(rows: list[tuple[str, Stage | None]]) -> None:
    """`appliance ps`, and `appliance top --once` with the requests below."""
    found: Any = msgspec.to_builtins(made(rows))
    running = sum(row["phase"] in interface.COMPUTED_PHASES for row in found["requests"])

    def answer(url: str, path: str) -> Any:
        return found["status"] if path == "/api/status" else found

    with _patched(answer):
        for command_line in (["ps"], ["top", "--once"]):
            output = CliRunner().invoke(cli, command_line, catch_exceptions=False).output
            lines = [line.split() for line in output.splitlines()]
            cells = [line[-2:] for line in lines if line[1:2] == ["loaded"]]
            assert sum(int(count) for count, _ in cells) == running
            assert sum(int(count) for _, count in cells) == len(rows) - running


def _patched(answer: Any) -> Any:
    from contextlib import ExitStack
    from unittest.mock import patch

    stack = ExitStack()
    stack.enter_context(patch("appliance.cli.main.get", answer))
    stack.enter_context(patch("appliance.cli.top.get", answer))
    return stack
