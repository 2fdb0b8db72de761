"""The front halves of models in one process know nothing of each other."""

from __future__ import annotations

from pathlib import Path

from appliance.frontend.serving.model_fronts import arguments, configuration
from tests.frontend.conftest import model_at


def test_a_reasoning_parser_is_its_models_own(generator: Path) -> None:
    """Built before, a model that reasons makes no other one reason."""
    thinks = arguments(model_at(generator, "thinks", reasoning_parser="qwen3"))
    assert configuration(thinks).structured_outputs_config.reasoning_parser == "qwen3"

    plain = arguments(model_at(generator, "plain"))

    assert not configuration(plain).structured_outputs_config.reasoning_parser
