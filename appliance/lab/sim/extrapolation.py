"""How far a run went beyond what its profiles were fitted to.

A fit holds for the sizes that were measured. What is computed beyond them is computed all the same,
but said: an extrapolation is never silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from appliance.lab.hardware import Measured, ModelProfile
from appliance.vocabulary import Word


class Beyond(Word, frozen=True, kw_only=True):
    """What was asked of one profile beyond its measurements."""

    share: float
    """Of the seconds that it computed."""
    prompt_tokens: int
    requests: int
    kv_tokens: int
    """The largest that were asked for; of a batch, all tokens together."""
    measured: Measured

    def __str__(self) -> str:
        """Which of them were larger than measured."""
        said = [
            f"{what} {asked} (measured to {known})"
            for what, asked, known in [
                ("prompts of", self.prompt_tokens, self.measured.prompt_tokens),
                ("batches of", self.requests, self.measured.requests),
                ("KV tokens of a batch", self.kv_tokens, self.measured.kv_tokens),
            ]
            if asked > known
        ]
        return f"{self.share:.0%} of its computing is extrapolated: {', '.join(said)}"


@dataclass(slots=True)
class _Asked:
    seconds: float = 0.0
    beyond_seconds: float = 0.0
    prompt_tokens: int = 0
    requests: int = 0
    kv_tokens: int = 0


@dataclass
class Reach:
    """Hears of everything that is computed; O(1) each."""

    _asked: dict[str, tuple[Measured, _Asked]] = field(default_factory=dict)
    """By profile, if it knows what it was fitted to."""

    def prompt(self, profile: ModelProfile, tokens: int, seconds: float) -> None:
        """A prompt of `tokens` tokens was computed; `seconds` is 0 if steps count them."""
        if profile.measured is not None:
            measured, asked = self._of(profile.name, profile.measured)
            asked.seconds += seconds
            asked.prompt_tokens = max(asked.prompt_tokens, tokens)
            if tokens > measured.prompt_tokens:
                asked.beyond_seconds += seconds

    def steps(self, profile: ModelProfile, requests: int, kv_tokens: int, seconds: float) -> None:
        """A batch took steps, the last with so many tokens of KV in all."""
        if profile.measured is not None:
            measured, asked = self._of(profile.name, profile.measured)
            asked.seconds += seconds
            asked.requests = max(asked.requests, requests)
            asked.kv_tokens = max(asked.kv_tokens, kv_tokens)
            if requests > measured.requests or kv_tokens > measured.kv_tokens:
                asked.beyond_seconds += seconds

    def add(self, other: Reach) -> None:
        """Take in everything that was asked of another."""
        for name, (measured, other_asked) in other._asked.items():
            _, asked = self._of(name, measured)
            asked.seconds += other_asked.seconds
            asked.beyond_seconds += other_asked.beyond_seconds
            asked.prompt_tokens = max(asked.prompt_tokens, other_asked.prompt_tokens)
            asked.requests = max(asked.requests, other_asked.requests)
            asked.kv_tokens = max(asked.kv_tokens, other_asked.kv_tokens)

    def beyond(self) -> dict[str, Beyond]:
        """By profile, in alphabetical order; only those that were asked for more than they know."""
        return {
            name: Beyond(
                share=round(asked.beyond_seconds / asked.seconds, 6) if asked.seconds else 0.0,
                prompt_tokens=asked.prompt_tokens,
                requests=asked.requests,
                kv_tokens=asked.kv_tokens,
                measured=measured,
            )
            for name, (measured, asked) in sorted(self._asked.items())
            if asked.requests > measured.requests
            or asked.kv_tokens > measured.kv_tokens
            or asked.prompt_tokens > measured.prompt_tokens
        }

    def _of(self, name: str, measured: Measured) -> tuple[Measured, _Asked]:
        found = self._asked.get(name)
        if found is None:
            found = self._asked[name] = measured, _Asked()
        return found


def worst(runs: Iterable[Mapping[str, Beyond]]) -> dict[str, Beyond]:
    """Of several runs, each profile's largest share, with what was asked for then."""
    found: dict[str, Beyond] = {}
    for run in runs:
        for name, beyond in run.items():
            if name not in found or beyond.share > found[name].share:
                found[name] = beyond
    return dict(sorted(found.items()))
