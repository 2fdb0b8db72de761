"""What an instance has to do: figures that are kept are those that would be made anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from appliance.plugins.instance_work.expected import Expectations, Expected
from appliance.plugins.instance_work.outlook import Outlooks, Terms
from appliance.scheduling.policy_api import BatchView, Costs, GroupView
from appliance.vocabulary import Slo
from tests.unit.plugins.policy_views import FixedCosts, batch_view, group_view, instance_view

# All times are sums of eighths, so that none is rounded, and many are equal.
TERMS = Terms(margin=0.25, slack_target=2.0, renewal_seconds=16.0, pace=0.5, output_tokens=64)
COSTS = FixedCosts(
    step=0.125, per_token=2**-10, switch=1.0, switches={"b": 0.0, "c": 4.0}, per_kv_token=2**-12
)
MODELS = ("a", "b", "c")
NOW = 128.0

times = st.integers(-160, 160).map(lambda eighths: NOW + eighths / 8)
slos = st.builds(
    Slo,
    ttft_seconds=st.sampled_from([0.5, 4.0, 16.0]),
    tbt_seconds=st.just(0.125),
    gap_seconds=st.sampled_from([0.0, 0.0, 2.0]),
)


class Anew(Expectations):
    """Keeps nothing, so that nothing made of it is kept either."""

    def of(self, model: str, now: float, costs: Costs) -> Expected:
        return Expectations().of(model, now, costs)


@st.composite
def batches(draw: st.DrawFn, model: str) -> BatchView:
    slo = draw(slos)
    deadlines = tuple(sorted(draw(st.lists(times, min_size=1, max_size=4))))
    scheduled = tuple([due + 1.0 for due in deadlines]) if slo.gap_seconds else ()
    view = batch_view(
        model,
        len(deadlines),
        runnable=draw(st.integers(0, len(deadlines))),
        away_tokens=draw(st.sampled_from([0, 16])),
        deadline=deadlines[0],
    )
    return structs.replace(view, slo=slo, deadlines=deadlines, scheduled=scheduled)


@st.composite
def prompts(draw: st.DrawFn) -> GroupView:
    slo, due = draw(slos), draw(times)
    view = group_view(
        draw(st.sampled_from(MODELS)),
        tokens=draw(st.integers(1, 4)) * 256,
        arrived=due - slo.ttft_seconds,
        deadline=due,
        interactive=draw(st.integers(0, 1)),
    )
    scheduled = due + 1.0 if slo.gap_seconds else None
    return structs.replace(view, slo=slo, scheduled=scheduled, resumed=draw(st.integers(0, 1)))


@given(st.data())
def test_what_is_kept_is_what_would_be_made_anew(data: st.DataObject) -> None:
    """Whatever comes, goes and stays, and however long it is since it was looked at last."""
    kept, anew = Outlooks(TERMS, Expectations()), Outlooks(TERMS, Anew())
    now = NOW
    decoding: dict[str, BatchView] = {}
    waiting: list[GroupView] = []
    for _ in range(data.draw(st.integers(2, 6))):
        now += data.draw(st.integers(0, 64)) / 8
        for model in data.draw(st.sets(st.sampled_from(MODELS), max_size=1)):
            decoding[model] = data.draw(batches(model))
        for model in data.draw(st.sets(st.sampled_from(MODELS), max_size=1)):
            decoding.pop(model, None)
        gone = data.draw(st.integers(0, 1))
        waiting = waiting[gone:] + data.draw(st.lists(prompts(), max_size=1))
        view = instance_view(
            batches=tuple(decoding.values()),
            groups=tuple(waiting),
            resident=data.draw(st.sampled_from(["a", "ab", "abc"])),
        )
        if data.draw(st.booleans()):
            kept.precedence.use(now, view.id, 0.75)
            anew.precedence.use(now, view.id, 0.75)

        assert kept.of(now, view, COSTS) == anew.of(now, view, COSTS)


def test_what_did_not_change_is_not_looked_at_again() -> None:
    """A prompt of one model comes: the figures of the other are the ones that were there."""
    outlooks = Outlooks(TERMS, Expectations())
    batch, group = batch_view("a", deadline=NOW + 8), group_view("b", deadline=NOW + 4)
    before = outlooks.of(NOW, instance_view(batches=(batch,), groups=(group,)), COSTS)
    more = (group, group_view("b", deadline=NOW + 2))

    after = outlooks.of(NOW + 1, instance_view(batches=(batch,), groups=more), COSTS)

    assert after["a"] is before["a"]
    assert (before["b"].due, after["b"].due) == (NOW + 4, NOW + 2)


def test_tokens_of_a_model_with_tight_first_tokens_are_due_earlier() -> None:
    """A switch takes more than a tenth of half a second, and less than one of 16: of the former's
    TTFT, half comes off."""
    outlooks = Outlooks(TERMS, Expectations())

    def due(ttft_seconds: float) -> float:
        batch = batch_view("a", deadline=NOW + 8)
        slo = structs.replace(batch.slo, ttft_seconds=ttft_seconds)
        view = instance_view(batches=(structs.replace(batch, slo=slo),))
        return outlooks.of(NOW, view, COSTS)["a"].due

    assert [due(0.5), due(16.0)] == [NOW + 8 - 0.25, NOW + 8]
