"""vLLM's ``/score`` and ``/rerank``: how well texts match, by a model that scores pairs of texts,
or by the angle between the vectors of one that embeds."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from litestar.types import Receive
from msgspec import UNSET, Meta, UnsetType

from appliance.api.embeddings import Tokens
from appliance.api.errors import BadRequest
from appliance.api.plan import off_loop
from appliance.api.pooled import (
    MAX_INPUTS,
    Pooled,
    check_length,
    check_lengths,
    cosine,
    numbers,
    pool,
    pooled_answer,
    requests_for,
)
from appliance.api.schemas import parse
from appliance.api.service import ModelCard, Service
from appliance.api.tasks import check_task
from appliance.engines.protocol import Pooling
from appliance.tokens import Tokenizer
from appliance.vocabulary import Task

_TASKS: Final = (Task.SCORE, Task.EMBED)
_Texts: TypeAlias = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/score``: one text with each of others, or two lists text by text."""

    model: str
    text_1: str | _Texts
    text_2: str | _Texts
    use_activation: bool | None = None
    """Of a model that scores: whether scores lie between 0 and 1."""
    user: str | None = None


class TextDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/rerank``, as Jina, Cohere and vLLM have it."""

    model: str
    query: str
    documents: Annotated[list[str | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """The best so many; all, if it is 0."""
    return_documents: bool | None = None
    """Left out, they are returned."""
    use_activation: bool | None = None
    user: str | None = None


class _Score(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class _Scores(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[_Score]
    usage: Tokens


class _Ranked(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    document: TextDocument | UnsetType = UNSET
    relevance_score: float


class _Ranking(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    usage: Tokens
    results: list[_Ranked]


def scoring_routes(service: Service) -> list[HTTPRouteHandler]:
    """``/v1/score`` and ``/v1/rerank``, and the other paths that vLLM has for them."""

    @post(["/v1/score", "/score"], status_code=200, operation_id="score")
    async def score(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), ScoreRequest)
        first = [asked.text_1] if isinstance(asked.text_1, str) else asked.text_1
        second = [asked.text_2] if isinstance(asked.text_2, str) else asked.text_2
        if len(first) not in (1, len(second)):
            raise BadRequest("text_1: one text, or as many as text_2 has", "text_1")
        scorer = _Scorer(service, asked.model, "Score", ("text_1", "text_2"))
        pooled = await scorer.pool(
            request.receive, first, second, f"score-{uuid.uuid4().hex}", asked.use_activation
        )

        def answer() -> _Scores:
            scores = scorer.scores(pooled, len(first), len(second))
            return _Scores(
                id=f"score-{uuid.uuid4().hex}",
                created=int(time.time()),
                model=asked.model,
                data=[_Score(index=index, score=one) for index, one in enumerate(scores)],
                usage=_usage(pooled),
            )

        return await pooled_answer(answer, pooled)

    @post(["/v1/rerank", "/rerank", "/v2/rerank"], status_code=200, operation_id="rerank")
    async def rerank(request: Request[Any, Any, Any]) -> ASGIResponse:
        asked = parse(await request.body(), RerankRequest)
        texts = [one if isinstance(one, str) else one.text for one in asked.documents]
        scorer = _Scorer(service, asked.model, "Rerank", ("query", "documents"))
        name = f"rerank-{uuid.uuid4().hex}"
        pooled = await scorer.pool(
            request.receive, [asked.query], texts, name, asked.use_activation
        )

        def answer() -> _Ranking:
            scores = scorer.scores(pooled, 1, len(texts))
            best = sorted(range(len(texts)), key=lambda index: -scores[index])
            told = asked.return_documents is not False
            results = [
                _Ranked(
                    index=index,
                    document=TextDocument(text=texts[index]) if told else UNSET,
                    relevance_score=scores[index],
                )
                for index in best[: asked.top_n or len(texts)]
            ]
            return _Ranking(id=name, model=asked.model, usage=_usage(pooled), results=results)

        return await pooled_answer(answer, pooled)

    return [score, rerank]


class _Scorer:
    """One model, and how it scores. `fields` are the names of both texts. Raises `ModelNotFound`,
    and `BadRequest` for a model that cannot score."""

    def __init__(self, service: Service, model: str, api: str, fields: tuple[str, str]) -> None:
        self._service = service
        self._card: ModelCard = service.model(model)
        check_task(self._card, _TASKS, api)
        self._tokenizer: Tokenizer = service.tokenizer(model)
        self._fields = fields
        self._pairs = self._card.purpose.task is Task.SCORE

    async def pool(
        self,
        receive: Receive,
        first: Sequence[str],
        second: Sequence[str],
        name: str,
        use_activation: bool | None,
    ) -> Pooled:
        """Each of `second` with its match, which is the only one in `first` if there is no other;
        or, by a model that embeds, each text by itself."""
        if use_activation is not None and not self._pairs:
            raise BadRequest("use_activation: an angle has none", "use_activation")
        if self._pairs:
            matches = list(first) * len(second) if len(first) == 1 else first
            length = sum(map(len, matches)) + sum(map(len, second))
            prompts = await off_loop(length, lambda: self._paired(matches, second))
        else:
            encode = self._tokenizer.encode
            length = sum(map(len, first)) + sum(map(len, second))
            prompts = await off_loop(length, lambda: [encode(text) for text in (*first, *second)])
            check_lengths(self._card, prompts[: len(first)], self._fields[0])
            check_lengths(self._card, prompts[len(first) :], self._fields[1])
        pooling = Pooling(use_activation=use_activation)
        requests = requests_for(self._card, prompts, pooling, name)
        return await pool(receive, requests, self._service)

    def _paired(self, first: Sequence[str], second: Sequence[str]) -> list[tuple[int, ...]]:
        """Raises `BadRequest` for a pair that the model cannot read: none is encoded behind it, as
        together they may be far longer than what was sent."""
        encode, most = self._tokenizer.encode, self._card.max_context_tokens
        prompts = []
        for match, pairs in groupby(zip(first, second, strict=True), key=itemgetter(0)):
            with_match = self._with(match)
            for _, other in pairs:
                prompt = with_match(other)
                alone = len(prompt) > most and len(encode(match, add_special_tokens=False)) > most
                check_length(self._card, prompt, self._fields[0 if alone else 1])
                prompts.append(prompt)
        return prompts

    def _with(self, match: str) -> Callable[[str], tuple[int, ...]]:
        """What makes a prompt of `match` and another text. Without marks between them, tokens may
        lie across both, and nothing can be made beforehand."""
        if self._card.purpose.separated:
            return self._tokenizer.encode_pairs(match)
        return lambda other: self._tokenizer.encode(match + other)

    def scores(self, pooled: Pooled, first: int, second: int) -> list[float]:
        """Of so many texts with so many others."""
        vectors = [numbers(vector) for vector in pooled.vectors]
        if self._pairs:
            return [vector[0] for vector in vectors]
        matches, others = vectors[:first], vectors[first:]
        if first == 1:
            matches = matches * second
        return [cosine(one, other) for one, other in zip(matches, others, strict=True)]


def _usage(pooled: Pooled) -> Tokens:
    return Tokens(prompt_tokens=pooled.prompt_tokens, total_tokens=pooled.prompt_tokens)
