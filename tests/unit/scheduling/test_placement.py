"""How classes are dealt to instances, and what a view says of a promise."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.scheduling.cluster import deal
from appliance.scheduling.policy_api import Fleet
from appliance.vocabulary import InstanceClass
from tests.unit.plugins.policy_views import request_view


@given(data=st.data(), known=st.lists(st.sampled_from(InstanceClass), min_size=1, max_size=12))
def test_a_fleet_is_dealt_with_the_fewest_changes(
    data: st.DataObject, known: list[InstanceClass]
) -> None:
    """There are as many of each class as the fleet says, the rest are parked, and no more change
    than there have to."""
    interactive = data.draw(st.integers(0, len(known)))
    mixed = data.draw(st.integers(0, len(known) - interactive))
    batch = data.draw(st.integers(0, len(known) - interactive - mixed))

    dealt = deal(Fleet(interactive=interactive, mixed=mixed, batch=batch), known)

    wanted = Counter(
        {
            InstanceClass.INTERACTIVE: interactive,
            InstanceClass.MIXED: mixed,
            InstanceClass.BATCH: batch,
            InstanceClass.PARKED: len(known) - interactive - mixed - batch,
        }
    )
    assert Counter(dealt) == wanted
    kept = sum(old is new for old, new in zip(known, dealt, strict=True))
    assert kept == (wanted & Counter(known)).total()


def test_a_first_token_is_due_when_it_was_promised() -> None:
    """The deadline of a request to be placed is its TTFT after it came."""
    assert request_view(arrived=2.0, ttft=1.5).deadline == pytest.approx(3.5)
