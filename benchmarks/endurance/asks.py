"""What is asked: chats of known answers in every dialect, and a few requests of other kinds."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from appliance.demo.run import Known
from appliance.demo.traffic import ChatRequest
from benchmarks.endurance.answers import Said

EMBEDDER = "vectors"
"""The model that is served a second time, to embed."""

STAY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bonn"]}, "nights": {"enum": [1, 2, 3]}},
    "required": ["city", "nights"],
    "additionalProperties": False,
}
BOOK = {"type": "function", "function": {"name": "book", "parameters": STAY, "strict": True}}


def with_tool_parser(configuration: str, parser: str) -> str:
    """The text of a configuration in which every model has a parser of tool calls."""
    return re.sub(r"(?m)^name = .*$", rf'\g<0>\ntool_parser = "{parser}"', configuration)


@dataclass(frozen=True)
class Ask:
    """A request. `prefix` is what ids of its dialect begin with; its answer has to be `expected`,
    or, if that is empty, `vectors`."""

    kind: str
    path: str
    prefix: str
    body: dict[str, Any]
    sequences: int = 1
    expected: tuple[Said, ...] = ()
    vectors: tuple[tuple[float, ...], ...] = ()

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


class Truth:
    """A chat, and its tokens on plain vLLM, undisturbed."""

    def __init__(self, chat: ChatRequest, answer: Known, checkpoint: Path) -> None:
        self.chat = chat
        self.prompt = answer.prompt
        self._tokens = answer.tokens
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.chat.prompt}]

    @property
    def tokens(self) -> int:
        return len(self._tokens)

    def said(self, max_tokens: int, stop: str | None = None, *, ids: bool = True) -> Said:
        """What the answer has to be that is cut behind so many tokens, or by `stop`."""
        tokens = self._tokens[:max_tokens]
        natural = len(self._tokens) < self.chat.max_tokens and len(tokens) == len(self._tokens)
        shown = tokens[:-1] if natural else tokens
        stream = DecodeStream(ids=self.prompt, skip_special_tokens=True)
        said = Said(ids=[] if ids else None, finish="stop" if natural else "length")
        for place, token in enumerate(shown):
            said.text += stream.step(self._tokenizer, token) or ""
            if stop is not None and stop in said.text:
                said.text = said.text[: said.text.index(stop)]
                said.finish, tokens = "stop", tokens[: place + 1]
                break
        if ids:
            said.ids = tokens
        return said

    def a_stop(self, dice: random.Random) -> str | None:
        """A string that the answer holds."""
        text = self.said(self.tokens).text
        if len(text) < 20:
            return None
        place = dice.randrange(len(text) // 4, len(text) - 4)
        return text[place : place + 4]


class Book:
    """Everything that may be asked."""

    def __init__(
        self, truths: Mapping[ChatRequest, Known], checkpoints: Path, *, unbounded: bool = False
    ) -> None:
        """If `unbounded`, most chats name no `max_tokens`."""
        self._unbounded = unbounded
        self._truths = [
            Truth(chat, answer, checkpoints / chat.model) for chat, answer in truths.items()
        ]
        self.others: list[Ask] = []
        """Those whose answer only the appliance tells, while nothing disturbs it."""

    def draw(self, dice: random.Random) -> Ask:
        """A random request."""
        if self.others and dice.random() < 0.15:
            return dice.choice(self.others)
        truth = dice.choice(self._truths)
        if self._unbounded and dice.random() < 0.7 and (stop := truth.a_stop(dice)):
            return _unbounded(truth, dice, stop)
        return dice.choices(_DIALECTS, _WEIGHTS)[0](truth, dice)

    def batch_line(self, dice: random.Random) -> Ask:
        """A random request that a batch may hold."""
        return replace(_chat(dice.choice(self._truths), dice, stream=False), kind="batch")

    def untold(self) -> list[Ask]:
        """Requests whose answers are to be found out."""
        texts = ["Hello, river", "The quick brown fox. " * 20, "one"]
        embeds = [
            Ask("embeddings", "/v1/embeddings", "embd-", {"model": EMBEDDER, "input": texts}, 3),
            Ask("embed", "/api/embed", "embd-", {"model": EMBEDDER, "input": texts[:1]}),
        ]
        return [*embeds, *(ask for truth in self._first() for ask in _others(truth))]

    def _first(self) -> list[Truth]:
        """One of each model."""
        return list({truth.chat.model: truth for truth in self._truths}.values())


def _tokens(truth: Truth, dice: random.Random) -> int:
    return min(dice.choice((1, 8, 16, 32, 48, 64, 96, 200)), truth.chat.max_tokens)


def _streams(dice: random.Random) -> bool:
    return dice.random() < 0.7


def _chat(truth: Truth, dice: random.Random, *, stream: bool | None = None) -> Ask:
    tokens, stop = _tokens(truth, dice), None
    body: dict[str, Any] = {"model": truth.chat.model, "messages": truth.messages}
    if dice.random() < 0.15 and (stop := truth.a_stop(dice)):
        body["stop"] = [stop]
    if stream is None:
        stream = _streams(dice)
    body |= {"max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    if dice.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": 5}
    said = truth.said(tokens, stop)
    return Ask("chat", "/v1/chat/completions", "chatcmpl-", body | {"stream": stream}, 1, (said,))


def _unbounded(truth: Truth, dice: random.Random, stop: str) -> Ask:
    """A chat that may become as long as the model's context."""
    body = {
        "model": truth.chat.model,
        "messages": truth.messages,
        "stop": [stop],
        "temperature": 0,
        "return_token_ids": True,
        "stream": _streams(dice),
    }
    said = truth.said(truth.tokens, stop)
    return Ask("unbounded", "/v1/chat/completions", "chatcmpl-", body, 1, (said,))


def _completion(truth: Truth, dice: random.Random) -> Ask:
    tokens = _tokens(truth, dice)
    body = {
        "model": truth.chat.model,
        "prompt": list(truth.prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
        "stream": _streams(dice),
    }
    return Ask("completion", "/v1/completions", "cmpl-", body, 1, (truth.said(tokens),))


def _message(truth: Truth, dice: random.Random) -> Ask:
    tokens = _tokens(truth, dice)
    body = {
        "model": truth.chat.model,
        "messages": truth.messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": _streams(dice),
    }
    said = truth.said(tokens, ids=False)
    return Ask("message", "/v1/messages", "chatcmpl-", body, 1, (said,))


def _ollama(truth: Truth, dice: random.Random) -> Ask:
    tokens = _tokens(truth, dice)
    options = {"temperature": 0, "num_predict": tokens}
    body: dict[str, Any] = {"model": truth.chat.model, "options": options, "stream": _streams(dice)}
    said = (truth.said(tokens, ids=False),)
    if dice.random() < 0.5:
        return Ask(
            "ollama chat", "/api/chat", "chatcmpl-", body | {"messages": truth.messages}, 1, said
        )
    body["prompt"] = truth.chat.prompt
    return Ask("ollama generate", "/api/generate", "chatcmpl-", body, 1, said)


_DIALECTS = (_chat, _completion, _message, _ollama)
_WEIGHTS = (45, 15, 20, 20)


def _others(truth: Truth) -> list[Ask]:
    """Responses, chance with a seed, a guide, and a tool."""
    common = {"model": truth.chat.model, "messages": truth.messages, "return_token_ids": True}
    seeded = {"max_tokens": 64, "temperature": 1.0, "seed": 11, "n": 2}
    guided = {
        "max_tokens": 200,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": STAY}},
    }
    tool = {"max_tokens": 200, "seed": 11, "tools": [BOOK], "tool_choice": "required"}
    # vLLM's prompt of a response has a second first token, so that its answer is another one.
    response = {"model": truth.chat.model, "input": truth.chat.prompt, "temperature": 0}
    response |= {"max_output_tokens": 48}
    path, prefix = "/v1/chat/completions", "chatcmpl-"
    return [
        Ask("response", "/v1/responses", "resp_", response),
        Ask("response", "/v1/responses", "resp_", response | {"stream": True}),
        Ask("seeded", path, prefix, common | seeded, 2),
        Ask("guided", path, prefix, common | guided),
        # Whole, a call is written anew by vLLM's parser; streamed, it is what the model wrote.
        Ask("tool", path, prefix, common | tool),
        Ask("tool", path, prefix, common | tool | {"stream": True}),
    ]
