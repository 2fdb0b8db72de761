"""How far the lab's truth is from what policies expect: bias, and seeded noise.

The estimates (`appliance.scheduling.cost_model`) begin with the same profiles as the instances run
by. With a deviation they are wrong, as they are in life: by a factor that they can learn, and by
noise that they cannot.
"""

from __future__ import annotations

import math
import random

from appliance.vocabulary import InstanceId, Word


class Deviation(Word, frozen=True, kw_only=True):
    """The truth over the estimate, by what is done; `noise` is the coefficient of variation of
    every prompt's and every turn's time."""

    prefill_factor: float = 1.0
    step_factor: float = 1.0
    link_factor: float = 1.0
    """Of the rate at which bytes are copied."""
    noise: float = 0.0
    seed: int = 0


EXACT = Deviation()


class Pace:
    """The factors on the times of one instance, each drawn when it is asked for."""

    def __init__(self, deviation: Deviation, instance: InstanceId) -> None:
        self._deviation = deviation
        self._sigma = math.sqrt(math.log1p(deviation.noise**2))
        self._random = random.Random(f"{deviation.seed} {instance}")

    def prefill(self) -> float:
        """Of a prompt."""
        return self._deviation.prefill_factor * self._noise()

    def turn(self) -> float:
        """Of all steps of a turn."""
        return self._deviation.step_factor * self._noise()

    def _noise(self) -> float:
        """Log-normal with mean 1."""
        if not self._sigma:
            return 1.0
        return self._random.lognormvariate(-(self._sigma**2) / 2, self._sigma)
