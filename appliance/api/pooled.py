"""Prompts that are pooled: handed in, waited for, and joined; and what vectors say of each other.

Every prompt is a request of its own, which takes its turn like any other. Of one answer only so
many are under way at a time, so that an answer of a thousand does not fill the queue.
"""

from __future__ import annotations

import asyncio
import math
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
from litestar.response.base import ASGIResponse
from litestar.types import Receive

from appliance.api.auth import LimitMet
from appliance.api.errors import BadRequest
from appliance.api.plan import off_loop
from appliance.api.service import (
    Generation,
    GenerationFailed,
    ModelCard,
    ModelNotFound,
    ModelQueueFull,
    QueueFull,
    RequestTimes,
    Service,
    SubmitRequest,
    removed,
)
from appliance.api.stream import unless_hung_up
from appliance.api.timing import longest, server_timing
from appliance.engines.protocol import Pooling, Sampling
from appliance.vocabulary import FinishReason, RequestClass

MAX_INPUTS: Final = 2048
"""Of one answer; OpenAI's limit."""

UNDER_WAY: Final = 32

_NOTHING: Final = Sampling(max_tokens=0)


class Pooled(NamedTuple):
    """What became of the prompts, in their order: little-endian float32."""

    vectors: list[bytes]
    prompt_tokens: int
    times: RequestTimes | None

    def headers(self) -> dict[str, str]:
        """What the time went to; of many, that of the one that took longest."""
        return {"server-timing": phases} if (phases := server_timing(self.times)) else {}


def check_dimensions(card: ModelCard, dimensions: int | None) -> None:
    """Raise `BadRequest` for a model whose vectors cannot be cut so."""
    purpose = card.purpose
    if dimensions is None or purpose.allows(dimensions):
        return
    if purpose.cuts is None:
        why = "this model's vectors cannot be cut (no Matryoshka embeddings)"
    elif purpose.cuts:
        why = f"this model's vectors have one of {list(purpose.cuts)}"
    else:
        why = f"this model's vectors have 1 to {purpose.dimensions}"
    raise BadRequest(f"dimensions: {why}", "dimensions")


def check_lengths(card: ModelCard, prompts: Sequence[tuple[int, ...]], field: str) -> None:
    """Raise `BadRequest` for prompts that the model cannot read."""
    for prompt in prompts:
        check_length(card, prompt, field)


def check_length(card: ModelCard, prompt: tuple[int, ...], field: str) -> None:
    """The same of one prompt."""
    if not prompt:
        raise BadRequest(f"{field}: there is a text without tokens", field)
    if len(prompt) > card.max_context_tokens:
        raise BadRequest(
            f"{field}: This model's maximum context length is {card.max_context_tokens} "
            f"tokens, but there is a text of {len(prompt)}",
            field,
            "context_length_exceeded",
        )


def requests_for(
    card: ModelCard,
    prompts: Sequence[tuple[int, ...]],
    pooling: Pooling,
    name: str,
    *,
    flex: bool = False,
) -> list[SubmitRequest]:
    """A request for each prompt; `name` is the id of the answer. Those that are `flex` wait for
    others. The first one says what all come to."""
    together = sum(map(len, prompts)) if len(prompts) > 1 else 0
    return [
        SubmitRequest(
            id=name if len(prompts) == 1 else f"{name}-{index}",
            model=card.id,
            prompt=prompt,
            sampling=_NOTHING,
            pooling=pooling,
            request_class=RequestClass.BATCH if flex else RequestClass.INTERACTIVE,
            together_tokens=0 if index else together,
        )
        for index, prompt in enumerate(prompts)
    ]


async def pool(receive: Receive, requests: Sequence[SubmitRequest], service: Service) -> Pooled:
    """Have the prompts pooled. All are given up when the client hangs up, or one of them fails.

    Raises `HungUp`, `GenerationFailed`, and what submitting raises if there is no room for even
    one.
    """
    return await unless_hung_up(receive, pool_all(requests, service))


async def pool_all(
    requests: Sequence[SubmitRequest], service: Service, under_way: int = UNDER_WAY
) -> Pooled:
    """The same where nobody could hang up; so many are under way at a time."""
    generations: list[Generation] = []
    reading: set[asyncio.Task[None]] = set()
    vectors: dict[str, bytes] = {}

    async def read(generation: Generation) -> None:
        vectors[generation.id] = await _vector(generation)

    try:
        for request in requests:
            while True:
                if len(reading) < under_way:
                    try:
                        generations.append(service.submit(request))
                        break
                    except (QueueFull, ModelQueueFull):
                        if not reading:
                            raise
                    except ModelNotFound as error:
                        raise removed(error.model) if generations else error from None
                    except LimitMet as met:  # all fitted, but the key has asked for more since
                        if not generations:
                            raise
                        if not reading:
                            await asyncio.sleep(met.retry_after_seconds)
                            continue
                reading = await _any_of(reading)
            reading.add(asyncio.create_task(read(generations[-1])))
        while reading:
            reading = await _any_of(reading)
    finally:
        for generation in generations:
            if generation.id not in vectors:
                generation.cancel(FinishReason.CANCELLED)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    return Pooled(
        [vectors[request.id] for request in requests],
        sum(len(request.prompt) for request in requests),
        longest(generation.times for generation in generations),
    )


async def _any_of(reading: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Those that are left when one is over; raises what it raised."""
    done, left = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return left


async def _vector(generation: Generation) -> bytes:
    vector: bytes | None = None
    async for batch in generation:
        for produced in batch:
            vector = produced.vector if vector is None else vector
    if vector is None:
        raise GenerationFailed("cancelled", "the request was cancelled", 503)
    return vector


def numbers(vector: bytes) -> tuple[float, ...]:
    """The elements of a vector."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Of the angle between two vectors; 0 of one without a length."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(operator.mul, one, other)) / lengths if lengths else 0.0


async def pooled_answer(make: Callable[[], object], pooled: Pooled) -> ASGIResponse:
    """What `make` makes of the vectors, as JSON."""
    elements = sum(len(vector) for vector in pooled.vectors)
    body = await off_loop(elements, lambda: msgspec.json.encode(make()))
    return ASGIResponse(body=body, media_type="application/json", headers=pooled.headers())
