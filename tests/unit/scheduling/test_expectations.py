"""How long outputs are expected to be, of models that had none yet and of those that had."""

from __future__ import annotations

from appliance.scheduling.demand import WINDOW_SECONDS, Demands
from appliance.vocabulary import RequestSpec
from tests.unit.doubles.cluster import SLO


def test_an_output_is_expected_as_long_as_others_were() -> None:
    """As long as the model's own so far, else as anybody's, else as is allowed; never longer than
    that. One without a token says nothing."""
    demands = Demands("ab")
    tokens = []

    def arrive(model: str, limit: int = 5000) -> None:
        before = demands.of[model].tokens_per_second
        spec = RequestSpec(id="r", model=model, prompt_tokens=100, max_tokens=limit, slo=SLO)
        demands.arrived(spec, 0.0)
        added = demands.of[model].tokens_per_second - before
        tokens.append(round(added * WINDOW_SECONDS))

    arrive("a")
    demands.ended("a", 300)
    arrive("b")
    demands.ended("b", 500)
    arrive("b")
    arrive("b", limit=50)
    demands.ended("b", 0)
    arrive("a")

    assert tokens == [5100, 400, 600, 150, 400]
