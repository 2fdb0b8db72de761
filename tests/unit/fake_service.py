"""An appliance in memory for tests of the API: its tokenizer is real, its models are scripts."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from appliance.api.service import (
    Activity,
    ChatRefused,
    GenerationFailed,
    InstanceActivity,
    InstanceVerification,
    KvShapeActivity,
    KvTierActivity,
    ModelActivity,
    ModelCard,
    ModelNotFound,
    QueueFull,
    Readiness,
    RequestTimes,
    SubmitRequest,
)
from appliance.engines.protocol import (
    NO_TOKEN,
    Guide,
    GuideKind,
    GuideRefused,
    Produced,
    TokenLogprob,
    Verdict,
)
from appliance.purpose import Purpose
from appliance.slabwords import SlabMap, SlabOwner
from appliance.tokens import ChatTemplate, Tokenizer
from appliance.toolcalls import CallPiece, Heard
from appliance.vocabulary import FinishReason

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "héllo wörld",
    "hello world, one two three",
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EOS = "<eos>"
KV = KvShapeActivity(
    mapped_bytes=400, used_bytes=200, cold_bytes=100, peak_bytes=400, fragmentation=0.25
)


@lru_cache
def byte_level_encoder() -> tokenizers.Tokenizer:
    """A byte-level BPE of 300 tokens; id 0 is the special end-of-text token."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator(CORPUS * 5, trainer)
    return encoder


@lru_cache
def small_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_encoder(), ChatTemplate(TEMPLATE, {"eos_token": EOS}))


class FakeGeneration:
    """A sequence whose tokens the test feeds."""

    def __init__(self, request: SubmitRequest) -> None:
        self.request = request
        self.id = request.id
        self.cancelled = asyncio.Event()
        self.drained = asyncio.Event()
        """The first batch was taken, and the next one was asked for."""
        self.reason: FinishReason | None = None
        self.reads: list[bool] = []
        """What was said of its reader, when that was another thing than before."""
        self.times: RequestTimes | None = None
        self._batches: asyncio.Queue[list[Produced] | GenerationFailed | None] = asyncio.Queue()

    def feed(self, tokens: Sequence[int], end: FinishReason | None = None) -> None:
        """One batch; `end` goes with its last token."""
        self._put([self._produced(token, self._logprobs(token)) for token in tokens], end)

    def feed_bare(self, tokens: Sequence[int], end: FinishReason | None = None) -> None:
        """The same without the log probabilities, whether asked for or not."""
        self._put([self._produced(token, ()) for token in tokens], end)

    def _produced(self, token: int, logprobs: tuple[TokenLogprob, ...]) -> Produced:
        return Produced(request=self.id, token=token, logprobs=logprobs)

    def _put(self, batch: list[Produced], end: FinishReason | None) -> None:
        batch[-1] = msgspec.structs.replace(batch[-1], finished=end)
        self._batches.put_nowait(batch)

    def say(self, text: str, end: FinishReason | None = FinishReason.LENGTH) -> None:
        """Every token of `text` as a batch of its own."""
        tokens = small_tokenizer().encode(text)
        for token in tokens[:-1]:
            self.feed([token])
        self.feed(tokens[-1:], end)

    async def say_until_unread(self, text: str) -> int:
        """Again and again, until nobody takes it any more; how often."""
        for said in range(1, 50_000):
            self.drained.clear()
            self.feed(small_tokenizer().encode(text))
            await self.drained.wait()
            if self.reads:
                return said
        raise AssertionError("it is never noticed")

    def pool(self, numbers: Sequence[float]) -> None:
        """The vector of the prompt, which is all that comes of it."""
        vector = struct.pack(f"<{len(numbers)}f", *numbers)
        pooled = Produced(request=self.id, token=NO_TOKEN, vector=vector)
        self._put([pooled], FinishReason.STOP)

    def fail(self, error: GenerationFailed) -> None:
        self._batches.put_nowait(error)

    def _logprobs(self, token: int) -> tuple[TokenLogprob, ...]:
        wanted = self.request.sampling.logprobs
        if wanted is None:
            return ()
        ranked = [TokenLogprob(1 + i, -float(i + 1), i + 1) for i in range(wanted)]
        return (TokenLogprob(token, float("-inf"), 7), *ranked)

    async def __aiter__(self) -> AsyncIterator[list[Produced]]:
        while (batch := await self._batches.get()) is not None:
            if isinstance(batch, GenerationFailed):
                raise batch
            yield batch
            self.drained.set()
            if batch[-1].finished is not None:
                return

    def cancel(self, reason: FinishReason) -> None:
        if self.reason is None:
            self.reason = reason
            self.cancelled.set()
            self._batches.put_nowait(None)

    def reader(self, *, reads: bool) -> None:
        if reads != (not self.reads or self.reads[-1]):
            self.reads.append(reads)


class FakeInterpretation:
    """Reads what stands between brackets as arguments of a call to the first tool, and, of a model
    that reasons, what stands between parentheses as reasoning. What has to call a tool, or to keep
    to a format, is guided; special tokens are text."""

    special_tokens = True

    def __init__(self, chat: dict[str, Any], choices: int, reasons: bool) -> None:
        self._tool = chat["tools"][0]["function"]["name"] if "tools" in chat else ""
        if self._tool == "refused":
            raise ChatRefused("nobody would call this")
        self.chat = chat
        self._reasons = reasons
        self._thinking = [False] * choices
        self._thoughts = [0] * choices
        """Characters of reasoning."""
        self.ended = 0
        self.heard: list[tuple[int, str, int, bool]] = []
        """Choice, text, number of tokens, whether it was the last."""
        self.guide = (
            Guide(GuideKind.STRUCTURAL_TAG, "tag")
            if chat.get("tool_choice", "auto") != "auto" or "response_format" in chat
            else None
        )
        self._calls = [-1] * choices
        self._inside = [False] * choices

    async def hear(self, choice: int, text: str, tokens: Sequence[int], finished: bool) -> Heard:
        assert not self.ended
        self.heard.append((choice, text, len(tokens), finished))
        if "#" in text:
            raise GenerationFailed("parser_failed", "it choked")
        content = reasoning = ""
        calls: list[CallPiece] = []
        for letter in text:
            if self._reasons and letter in "()":
                self._thinking[choice] = letter == "("
            elif self._thinking[choice]:
                reasoning += letter
                self._thoughts[choice] += 1
            elif letter == "[" and self._tool:
                self._inside[choice] = True
                self._calls[choice] += 1
                number = self._calls[choice]
                calls.append(CallPiece(number, f"call-{choice}-{number}", self._tool, ""))
            elif letter == "]" and self._tool:
                self._inside[choice] = False
            elif self._inside[choice]:
                calls.append(CallPiece(self._calls[choice], None, None, letter))
            else:
                content += letter
        whole = calls if self.chat["stream"] else _merged(calls)
        counted = self._thoughts[choice] if finished else 0
        return Heard(content, tuple(whole), reasoning, counted)

    def end(self) -> None:
        self.ended += 1


def _merged(calls: Sequence[CallPiece]) -> list[CallPiece]:
    """The pieces of each call as one."""
    merged: list[CallPiece] = []
    for call in calls:
        if call.id is not None:
            merged.append(call)
        else:
            whole = merged[-1].arguments + call.arguments
            merged[-1] = msgspec.structs.replace(merged[-1], arguments=whole)
    return merged


class FakeService:
    """Two models, one with a slash in its name, which can choose tools, and `reasons` if it is told
    so. `script` runs for every request as it comes."""

    def __init__(
        self, script: Callable[[FakeGeneration], None] | None = None, *, reasons: bool = False
    ) -> None:
        self.script = script
        self.submitted: list[FakeGeneration] = []
        self.interpretations: list[FakeInterpretation] = []
        self.arrivals: asyncio.Queue[FakeGeneration] = asyncio.Queue()
        self.room = 1000
        self.reasons: tuple[str, ...] = ()
        self.text = small_tokenizer()
        self._cards = {
            name: ModelCard(
                id=name,
                created=1_700_000_000,
                max_context_tokens=200,
                tool_parser=parser,
                reasoning_parser="qwen3" if reasons and parser else None,
                architecture="LlamaForCausalLM",
                dtype="bfloat16",
                weight_bytes=300,
            )
            for name, parser in (("small", None), ("org/small", "hermes"))
        }

    def learn(self, name: str, purpose: Purpose) -> None:
        """Have one more model, which is for something."""
        card = msgspec.structs.replace(self._cards["small"], id=name, purpose=purpose)
        self._cards[name] = card

    def models(self) -> list[ModelCard]:
        return list(self._cards.values())

    def model(self, name: str) -> ModelCard:
        if name not in self._cards:
            raise ModelNotFound(name)
        return self._cards[name]

    def tokenizer(self, name: str) -> Tokenizer:
        self.model(name)
        return self.text

    async def check_guide(self, name: str, guide: Guide) -> None:
        self.model(name)
        if "impossible" in guide.text:
            raise GuideRefused("nothing follows this")

    async def interpret(
        self, name: str, chat: bytes, prompt: Sequence[int], choices: int
    ) -> FakeInterpretation:
        interpretation = FakeInterpretation(
            msgspec.json.decode(chat), choices, self.model(name).reasoning_parser is not None
        )
        self.interpretations.append(interpretation)
        return interpretation

    def submit(self, request: SubmitRequest) -> FakeGeneration:
        if len(self.submitted) >= self.room:
            raise QueueFull(2.4)
        generation = FakeGeneration(request)
        self.submitted.append(generation)
        self.arrivals.put_nowait(generation)
        if self.script is not None:
            self.script(generation)
        return generation

    def readiness(self) -> Readiness:
        return Readiness(ok=not self.reasons, reasons=self.reasons)

    def activity(self) -> Activity:
        return Activity(
            version="1",
            uptime_seconds=1.5,
            instances=(
                InstanceActivity(
                    instance=0,
                    role="mixed",
                    state="up",
                    pool_bytes={"weights:small": 300, "kv:small": 100, "free": 600},
                ),
            ),
            models=(
                ModelActivity(model="small", state="loaded", residency={"0": "loaded"}),
                ModelActivity(model="org/small", state="cold"),
            ),
            kv={"host": KvTierActivity(fragmentation=0.25, shapes={"300": KV})},
        )

    async def pool_map(self, number: int) -> SlabMap:
        owners = (SlabOwner(name="free"), SlabOwner(name="kv:small", moving=True))
        return SlabMap(slab_bytes=100, owners=owners, runs=((1, 1), (0, 9)))

    def host_map(self) -> SlabMap:
        return SlabMap(slab_bytes=100, owners=(SlabOwner(name="free"),), runs=((0, 20),))

    async def verify(self) -> list[InstanceVerification]:
        return [
            InstanceVerification(
                instance=0,
                answered=True,
                models={"small": Verdict.OK, "org/small": Verdict.NO_IMAGE},
            ),
            InstanceVerification(instance=1, answered=False),
        ]

    def metrics(self) -> bytes:
        return b"some_metric 1\n"
