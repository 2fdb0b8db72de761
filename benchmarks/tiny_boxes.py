"""Boxes so small that a search finds the best that any policy could do, as settings of the lab.

Time comes in slots of 1/64 s, so that sums of times have no rounding. A decoding step takes one
slot, a step that computes prompts and a load some slots more, whatever the batch. Orders and
mapping take no time, and KV moves in next to none: what is lost is lost by decisions alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from appliance.lab.experiments.metrics import TOLERANCE_SECONDS, expand
from appliance.lab.experiments.run import Contender, Setting, play
from appliance.lab.hardware import Box, GpuSpec, ModelProfile
from appliance.lab.workload import Arrival
from appliance.vocabulary import ModelSpec, Slo

SLOT_SECONDS = 1 / 64
SLAB_BYTES = 1 << 20
SLABS_PER_LOAD_SLOT = 4
KV_SLABS = 64
PROMPT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """Times in slots."""

    load: int
    prompt: int
    """A step that computes prompts, however many, beside decoding or alone."""
    ttft: int
    tbt: int


@dataclass(frozen=True, kw_only=True)
class TinyRequest:
    """Of the model with this number; it arrives in this slot."""

    arrives: int
    model: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TinyBox:
    """Instances have room for the weights of one model, or of all. Nothing is loaded at first."""

    instances: int
    all_fit: bool
    models: tuple[TinyModel, ...]
    requests: tuple[TinyRequest, ...]
    """In the order of arrival."""

    @property
    def tokens(self) -> int:
        """Of all requests."""
        return sum(request.tokens for request in self.requests)

    def due(self, request: TinyRequest, token: int) -> int:
        """The last slot at whose end the token is in time; tokens count from 0."""
        model = self.models[request.model]
        return request.arrives + model.ttft + token * model.tbt

    @property
    def slots(self) -> int:
        """Enough for any policy that goes on working: all jobs one after the other, with a load
        before each token."""
        last = max(self.due(request, request.tokens) for request in self.requests)
        longest = max(model.load + model.prompt for model in self.models)
        return last + (self.tokens + 1) * (longest + 1)

    def setting(self) -> Setting:
        """The same for the lab. Tokens are due half a slot later, so that no comparison of a
        token's time with its due time is close."""
        return Setting(
            models=[_spec(number, model) for number, model in enumerate(self.models)],
            box=self._hardware(),
            profiles={f"m{n}": _profile(n, model) for n, model in enumerate(self.models)},
            arrivals=[
                Arrival(
                    seconds=request.arrives * SLOT_SECONDS,
                    model=f"m{request.model}",
                    prompt_tokens=PROMPT_TOKENS,
                    output_tokens=request.tokens,
                )
                for request in self.requests
            ],
            seconds=self.slots * SLOT_SECONDS,
        )

    def _hardware(self) -> Box:
        sizes = [_weight_slabs(model) for model in self.models]
        slabs = KV_SLABS + (sum(sizes) if self.all_fit else max(sizes))
        gpu = GpuSpec(
            name="tiny",
            vram_bytes=slabs * SLAB_BYTES,
            pcie_bytes_per_second=SLABS_PER_LOAD_SLOT * SLAB_BYTES / SLOT_SECONDS,
            efficiency=1.0,
        )
        return Box(
            gpu=gpu,
            instances=self.instances,
            host_bytes=1 << 34,
            pool_share=1.0,
            slab_bytes=SLAB_BYTES,
        )


def _weight_slabs(model: TinyModel) -> int:
    """Those that the link copies in the load's slots, and more than KV leaves of the pool where
    one model is to fit."""
    return SLABS_PER_LOAD_SLOT * model.load


def _spec(number: int, model: TinyModel) -> ModelSpec:
    return ModelSpec(
        name=f"m{number}",
        weight_bytes=_weight_slabs(model) * SLAB_BYTES,
        max_context_tokens=1024,
        max_batch=64,
        slo=Slo(
            ttft_seconds=(model.ttft + 0.5) * SLOT_SECONDS, tbt_seconds=model.tbt * SLOT_SECONDS
        ),
    )


def _profile(number: int, model: TinyModel) -> ModelProfile:
    return ModelProfile(
        name=f"m{number}",
        weight_bytes=_weight_slabs(model) * SLAB_BYTES,
        layers=64,
        hidden=64,
        kv_bytes_per_token=256,
        prefill_base_seconds=model.prompt * SLOT_SECONDS,
        prefill_seconds_per_token=0.0,
        prefill_seconds_per_token2=0.0,
        step_base_seconds=SLOT_SECONDS,
        step_seconds_per_kv_token=0.0,
        step_seconds_per_sequence=0.0,
    )


def tokens_in_time(box: TinyBox, policy: str) -> int:
    """What an installed policy reaches in the lab."""
    run = play(box.setting(), Contender(policy, (policy,))).run
    lives = run.recorder.lives
    times = expand(run.recorder, lives)
    first = np.array([life.arrived + life.slo.ttft_seconds for life in lives])
    between = np.array([life.slo.tbt_seconds for life in lives])
    due = first[times.request] + times.index * between[times.request]
    return int((times.seconds <= due + TOLERANCE_SECONDS).sum())


def cases(count: int, seed: int) -> Iterator[TinyBox]:
    """Random boxes: two models, one or two instances, three to six requests. The same seed has the
    same boxes; a larger count has those of a smaller one first."""
    draw = random.Random(seed)
    for _ in range(count):
        yield _case(draw)


def _case(draw: random.Random) -> TinyBox:
    instances, all_fit = draw.choice((1, 2)), draw.random() < 0.25
    loads = [draw.randint(KV_SLABS // SLABS_PER_LOAD_SLOT + 1, 40) for _ in range(2)]
    models = []
    for load in loads:
        prompt = draw.randint(1, 4)
        ttft = draw.randint(max(loads) + prompt, 3 * max(loads))
        models.append(TinyModel(load=load, prompt=prompt, ttft=ttft, tbt=draw.randint(2, 8)))
    arrives, longest_gap, requests = 0, draw.randint(0, 40), []
    for number in range(draw.randint(3, 6)):
        arrives += draw.randint(0, longest_gap) if number else 0
        model, tokens = draw.randrange(2), draw.randint(4, 30)
        requests.append(TinyRequest(arrives=arrives, model=model, tokens=tokens))
    return TinyBox(
        instances=instances, all_fit=all_fit, models=tuple(models), requests=tuple(requests)
    )
