"""Turns of a model of which nothing stays on the device in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from appliance.engines.protocol import Produced
from tests.engine.house import House, Sampling, sequence


def prompts(model: str) -> list[tuple[int, ...]]:
    """Three prompts: shorter than a block, ending on one, and over several."""
    start = 3 + sum(model.encode()) % 50
    return [tuple(start + i * 7 % 400 for i in range(n)) for n in (5, 64, 90)]


def continued(
    ask: Callable[[Sequence[tuple[int, ...]], int], list[list[int]]],
    asked: Sequence[tuple[int, ...]],
    kept: Sequence[Sequence[int]],
    length: int,
) -> list[list[int]]:
    """What plain vLLM says in so many tokens, if it begins anew behind those `kept`: `ask` has it
    say so many behind each prompt. A token that is computed with a prompt may differ in the last
    bit from one that is decoded, where numbers are rounded to bfloat16."""
    tokens = len(kept[0])
    assert [list(output) for output in kept] == [said[:tokens] for said in ask(asked, length)]
    tails = ask([(*p, *output) for p, output in zip(asked, kept, strict=True)], length - tokens)
    return [[*output, *tail] for output, tail in zip(kept, tails, strict=True)]


class Player:
    """One model's requests, of which nothing but the host tier survives between two turns."""

    def __init__(
        self,
        house: House,
        model: str,
        sampling: Sampling,
        asked: Sequence[tuple[int, ...]] | None = None,
        features: Sequence[list[Any]] = (),
    ) -> None:
        """`asked` are `prompts` of the model, if None; `features` what is read besides with each,
        if anything is."""
        self.house = house
        self.model = model
        self.sampling = sampling
        self.engine: Any = house.engines[model]
        self.features: dict[str, list[Any]] = {}
        self.asked: dict[str, tuple[int, ...]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.places: dict[str, tuple[int, ...]] = {}
        self.live: list[str] = []
        self.lost: set[str] = set()
        """Of what is live: what has no KV any more."""
        for number, prompt in enumerate(prompts(model) if asked is None else asked):
            name = f"{model}/{number}"
            self.features[name] = features[number] if features else []
            self.asked[name] = prompt
            self._add(name)
            self.outputs[name] = []
            self.places[name] = house.swap_places(self.engine, len(prompt) + sampling["max_tokens"])
            self.live.append(name)

    def turn(self, steps: int, slabs: int) -> None:
        """Weights and KV in, a few steps, everything out."""
        self.engine.begin_load().wait()
        for name in self.live:
            if self.outputs[name] and name not in self.lost:
                self.engine.swap_in(name, self.places[name], slabs)
            else:
                self.take(self.engine.prefill(name, slabs))
        self.lost.clear()
        for _ in range(steps):
            self.take(self.engine.step(self.live, slabs))
        for name in self.live:
            self.house.swap_out(self.engine, name, self.places[name])
        assert self.engine.trim(0).slabs == 0
        self.engine.evict_weights()

    def lose(self, house: House) -> None:
        """The worker was killed, and all KV is lost: each live request begins again in the engine
        of another house, behind the tokens that it has produced."""
        killed = self.engine
        self.house, self.engine = house, house.engines[self.model]
        for name in self.live:
            killed.forget(name)
            prompt, output = self.asked[name], tuple(self.outputs[name])
            self._add(name, output)
            tokens = len(prompt) + self.sampling["max_tokens"]
            self.places[name] = house.swap_places(self.engine, tokens)
            self.lost.add(name)

    def _add(self, name: str, output: tuple[int, ...] = ()) -> None:
        self.engine.add(
            sequence(
                self.model,
                name,
                self.asked[name],
                self.sampling,
                output,
                mm_features=self.features[name],
            )
        )

    def take(self, produced: list[Produced]) -> None:
        for one in produced:
            self.outputs[one.request].append(one.token)
            if one.finished:
                self.live.remove(one.request)
