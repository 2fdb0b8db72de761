"""Requests with images or sounds in prompts, of one engine after another, and what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from appliance.config.schema import Devices
from appliance.units import Bytes, Memory
from tests.engine.house import SLAB, House, Sampling, sequence
from tests.engine.with_images import Prepared

LENGTH: Final = 12
"""Tokens that are added to each prompt."""
SLABS: Final = 48
POOL: Final = 96
"""Slabs: for the KV of all prompts at once, too."""
DEVICES: Final = Devices(kind="cpu", memory_bytes=Memory(POOL * SLAB), slab_bytes=Bytes(SLAB))
GREEDY: Final = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)


class Requests:
    """Prompts with images of one model, their tokens so far, and the places of their KV."""

    def __init__(self, house: House, name: str, prompts: Sequence[Prepared]) -> None:
        self.house, self.name, self.engine = house, name, house.engines[name]
        self.prompts = {f"{name}/{number}": prompt for number, prompt in enumerate(prompts)}
        self.outputs: dict[str, list[int]] = {request: [] for request in self.prompts}
        self.places: dict[str, tuple[int, ...]] = {}
        self.move(house)

    @property
    def live(self) -> list[str]:
        return [one for one, output in self.outputs.items() if len(output) < LENGTH]

    def move(self, house: House) -> None:
        """All begin anew in the engine of this house, behind what they have produced."""
        for request in self.live:
            if self.engine.knows(request):
                self.engine.forget(request)
        self.house, self.engine = house, house.engines[self.name]
        for request in self.live:
            tokens, features = self.prompts[request]
            output = tuple(self.outputs[request])
            spec = sequence(self.name, request, tokens, GREEDY, output, mm_features=features)
            self.engine.add(spec)
            self.places[request] = house.swap_places(self.engine, len(tokens) + LENGTH)

    def take(self, produced: Sequence[Any]) -> None:
        for one in produced:
            self.outputs[one.request].append(one.token)

    def prefill(self) -> None:
        for request in self.live:
            self.take(self.engine.prefill(request, SLABS))

    def begin(self, request: str, like: str) -> None:
        """One more request with the prompt of another, of which a step computes a part of the
        first image."""
        prompt = self.prompts[request] = self.prompts[like]
        self.outputs[request] = []
        spec = sequence(self.name, request, prompt.tokens, GREEDY, mm_features=prompt.features)
        self.engine.add(spec)
        self.engine.begin_load().wait()
        self.engine.begin_prefill(request, SLABS)
        assert not self.engine.step((), SLABS, [request], prompt.features[0].mm_position.offset + 2)

    def turn(self, *, again: bool) -> None:
        """Weights and KV in, three steps, everything out."""
        self.engine.begin_load()  # images wait for what reads them
        for request in self.live:
            if again:
                self.engine.swap_in(request, self.places[request], SLABS)
            else:
                self.take(self.engine.prefill(request, SLABS))
        for _ in range(3):
            self.take(self.engine.step(self.live, SLABS))
        for request in self.live:
            self.house.swap_out(self.engine, request, self.places[request])
        assert self.engine.trim(0).slabs == 0
        self.engine.evict_weights()
        assert_nothing_kept(self.engine)


def assert_nothing_kept(engine: Any) -> None:
    """Of what the encoder made, in use or by vLLM."""
    engine.trim(0)
    assert engine.kv_use().image_bytes == 0
    assert not engine._runner.encoder_cache
    kept = engine._scheduler.encoder_cache_manager
    left = kept.cached, kept.freeable, kept.request_cached_ids, kept.num_embeds_by_hash
    assert not any(left)
    assert kept.num_free_slots == kept.num_freeable_slots == kept.cache_size


def add(engine: Any, request: str, prompt: Prepared, salt: str | None = None) -> None:
    tokens, features = prompt
    engine.add(
        sequence(engine.model, request, tokens, GREEDY, mm_features=features, cache_salt=salt)
    )


def finish(engine: Any, prompts: Sequence[Prepared], chunk: int) -> list[list[int]]:
    """Outputs of prompts that are computed together, so many tokens in a step."""
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for request, prompt in zip(outputs, prompts, strict=True):
        add(engine, request, prompt)
        engine.begin_prefill(request, SLABS)
    while any(len(output) < LENGTH for output in outputs.values()):
        live = [one for one, output in outputs.items() if 0 < len(output) < LENGTH]
        beginning = [one for one, output in outputs.items() if not output]
        for produced in engine.step(live, SLABS, beginning, chunk):
            outputs[produced.request].append(produced.token)
    assert_nothing_kept(engine)
    engine.trim(0)
    return list(outputs.values())
