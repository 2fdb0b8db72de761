"""When tokens are due of requests with a longest gap, and what is shown of that."""

from __future__ import annotations

from appliance.scheduling.cluster import strictest
from appliance.scheduling.lifecycle import Stage
from appliance.vocabulary import Slo
from tests.unit.doubles.cluster import SLO, ClusterDouble, shape
from tests.unit.doubles.instance import ModelDouble

GAPS = Slo(ttft_seconds=10.0, tbt_seconds=0.1, gap_seconds=1.0)


def ready(steps: int = 4) -> ClusterDouble:
    """An instance with every engine built, whose turns have so many steps."""
    cluster = ClusterDouble({name: ModelDouble(4, shape()) for name in "ab"}, slabs=40)
    cluster.start()
    cluster.settle()
    cluster.up[0].steps_per_turn = steps
    return cluster


def until(cluster: ClusterDouble, name: str, stage: Stage) -> None:
    cluster.work_until(0, lambda: cluster.machine.requests[name].stage is stage)


def leave(cluster: ClusterDouble, name: str) -> None:
    """Work until another model runs, and the request waits for that."""
    if "other" not in cluster.machine.requests:
        cluster.ask("other", "b", output=100)
    until(cluster, name, Stage.RUNNING)
    until(cluster, name, Stage.READY)
    until(cluster, "other", Stage.RUNNING)
    assert cluster.machine.requests[name].stage is Stage.READY


def test_the_next_token_is_due_a_gap_after_the_last_one() -> None:
    """A stream that was ahead of its schedule loses that when it is left; not while it is in a
    turn, as its next token is on its way then. The first token has no gap before it."""
    cluster = ready()
    cluster.ask("r", "a", output=60, slo=GAPS)
    request = cluster.machine.requests["r"]
    assert request.next_due == request.scheduled == request.arrived + 10.0
    until(cluster, "r", Stage.RUNNING)
    assert request.next_due == request.scheduled == request.arrived + 10.0 + 0.1
    leave(cluster, "r")

    assert request.generated > 1
    assert request.next_due == request.newest_token + 1.0
    assert request.scheduled == request.arrived + 10.0 + request.generated * 0.1


def test_a_late_stream_is_due_as_scheduled() -> None:
    """The earlier of the two holds."""
    cluster = ready()
    cluster.ask("r", "a", output=60, slo=GAPS)
    cluster.now += 60.0
    leave(cluster, "r")

    request = cluster.machine.requests["r"]
    assert request.next_due == request.scheduled < request.newest_token


def test_a_gap_does_not_run_while_a_client_reads_nothing() -> None:
    """The pause is excused, as for the schedule."""
    cluster = ready()
    cluster.ask("r", "a", output=60, slo=GAPS)
    until(cluster, "r", Stage.RUNNING)
    request = cluster.machine.requests["r"]
    cluster.stall("r")
    until(cluster, "r", Stage.PAUSED)
    cluster.ask("other", "b", output=100)
    until(cluster, "other", Stage.RUNNING)
    newest = request.newest_token
    cluster.now += 100.0

    cluster.read_on("r")

    assert request.newest_token == newest + cluster.now - request.paused_at
    assert request.stage is Stage.READY
    assert request.next_due == request.newest_token + 1.0


def test_views_show_both() -> None:
    """The most urgent first, with gaps and without; of a batch without gaps there is no second
    list. The strictest SLO has the shortest gap that is promised."""
    cluster = ready()
    cluster.ask("r", "a", output=60, slo=GAPS)
    cluster.ask("s", "a", output=60)
    until(cluster, "s", Stage.RUNNING)
    leave(cluster, "r")
    requests = cluster.machine.requests

    view = cluster.machine.cluster.view(cluster.machine.instances[0])

    gaps, plain = sorted(view.batches, key=lambda batch: batch.model)
    r, s, t = (requests[name] for name in ("r", "s", "other"))
    assert gaps.slo == GAPS
    assert gaps.deadlines == tuple(sorted([r.newest_token + 1.0, s.scheduled]))
    assert gaps.deadline == gaps.deadlines[0] == r.next_due
    assert gaps.scheduled == tuple(sorted([r.scheduled, s.scheduled]))
    assert (plain.slo, plain.deadlines, plain.scheduled) == (SLO, (t.scheduled,), ())


def test_a_group_shows_both_of_a_stream_that_is_computed_again() -> None:
    """So that nothing takes the end of its gap for its schedule."""
    cluster = ready()
    cluster.ask("r", "a", output=60, slo=GAPS)
    request = cluster.machine.requests["r"]
    cluster.work_until(0, lambda: request.generated > 1)
    cluster.lose(0)
    cluster.start()

    (view,) = cluster.machine.cluster.view(cluster.machine.instances[0]).groups

    assert view.deadline == request.newest_token + 1.0
    assert view.scheduled == request.scheduled > view.deadline
    assert view.resumed == 1


def test_the_strictest_gap_is_the_shortest_promised() -> None:
    """None is no promise, rather than the strictest of all."""
    longer = Slo(ttft_seconds=5.0, tbt_seconds=0.2, gap_seconds=2.0)

    assert strictest([SLO, longer, GAPS]) == Slo(ttft_seconds=5.0, tbt_seconds=0.1, gap_seconds=1.0)
    assert strictest([SLO, SLO]).gap_seconds == 0.0
