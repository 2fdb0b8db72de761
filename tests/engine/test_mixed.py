"""Prompts that a worker computes in chunks beside others' decoding: no token is another for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from appliance.vocabulary import (
    BuildModel,
    LoadModel,
    Preempt,
    PrefillDeferred,
    PrefillDone,
    Release,
    RunPrefill,
    RunTurn,
    TurnEnd,
    TurnEnded,
)
from appliance.worker import frames
from appliance.worker.mailbox import Mailbox
from appliance.worker.worker import Worker
from tests.engine.house import VOCAB, Baseline, House, Sampling, sequence, tokens

MODELS = ["llama-mha", "qwen2-gqa", "qwen3-128", "llama-96"]
MODEL = "llama-mha"
PLENTY = 60
LENGTH = 30
GREEDY = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
SEEDED = Sampling(max_tokens=LENGTH, temperature=0.9, seed=7, top_p=0.9, ignore_eos=True)


def prompt(length: int, start: int = 3) -> tuple[int, ...]:
    return tuple(3 + (start + i * 7) % (VOCAB - 3) for i in range(length))


class Box:
    """A worker in this thread, on engines of the house."""

    def __init__(self, house: House, model: str = MODEL) -> None:
        self.model = model
        self.engine: Any = house.engines[model]
        self.outputs: dict[str, list[int]] = {}
        self.reports: list[Any] = []
        self.on_tokens: Callable[[frames.Tokens], None] = lambda report: None
        """Called while the worker is in the midst of its job."""
        self.mailbox = Mailbox()
        self._turns = 0
        configuration = frames.Configure(
            version=frames.PROTOCOL_VERSION,
            instance=0,
            cpus="",
            slabs=house.arena.slabs,
            slab_bytes=house.arena.slab_bytes,
            host_bytes=house.host.nbytes,
            models=[frames.WorkerModel(model, "", "float32", 1024, 16)],
        )
        self.worker = Worker(
            configuration,
            house.arena,
            house.swapper,
            self.mailbox,
            lambda _: self.engine,
            self._on_reports,
        )
        self.carry_out(BuildModel(instance=0, model=model), LoadModel(instance=0, model=model))

    def _on_reports(self, reports: Sequence[frames.Up]) -> None:
        self.reports += reports
        for report in reports:
            if isinstance(report, frames.Tokens):
                for one in report.produced:
                    self.outputs.setdefault(one.request, []).append(one.token)
                self.on_tokens(report)

    def carry_out(self, *commands: frames.Down) -> list[Any]:
        """What the worker reports of these commands, but for the state of its pool."""
        self.reports.clear()
        for command in (*commands, frames.Shutdown()):
            self.mailbox.put(command)
        self.worker.run()
        return [report for report in self.reports if not isinstance(report, frames.PoolReport)]

    def add(self, name: str, words: tuple[int, ...], sampling: Sampling = GREEDY) -> None:
        self.carry_out(frames.AddSequence(sequence(self.model, name, words, sampling)))

    def start(self, name: str, words: tuple[int, ...], sampling: Sampling = GREEDY) -> None:
        """Add a request, and compute its prompt alone."""
        self.add(name, words, sampling)
        prefill = RunPrefill(instance=0, model=self.model, request=name, kv_slabs=PLENTY)
        assert isinstance(self.carry_out(prefill)[-1], PrefillDone)

    def turn(
        self,
        *requests: str,
        prompts: tuple[str, ...] = (),
        chunk: int = 16,
        slabs: int = PLENTY,
        quota: float = 0.0,
    ) -> tuple[list[PrefillDone | PrefillDeferred], TurnEnded]:
        """What a turn tells of its prompts, and of its end."""
        self._turns += 1
        *reports, ended = self.carry_out(
            RunTurn(
                instance=0,
                model=self.model,
                turn=self._turns,
                requests=requests,
                quota_seconds=quota,
                kv_slabs=slabs,
                prompts=prompts,
                chunk_tokens=chunk if prompts else 0,
            )
        )
        assert isinstance(ended, TurnEnded)
        return [r for r in reports if isinstance(r, PrefillDone | PrefillDeferred)], ended

    def finish(self) -> dict[str, list[int]]:
        """The outputs of all requests, which decode to their ends."""
        self.turn(*self.outputs, quota=1e6)
        return self.outputs

    def release(self, request: str) -> Release:
        return Release(instance=0, model=self.model, request=request)


@pytest.fixture
def box(house: House) -> Box:
    """A worker whose one model is loaded."""
    return Box(house)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("chunk", [7, 16, 64, 5000])
@pytest.mark.parametrize("model", MODELS)
def test_mixed_turns_equal_plain_vllm(
    house: House, plain_vllm: Baseline, model: str, chunk: int, sampling: Sampling
) -> None:
    """Three prompts beside three requests, who get a token in each of the steps that it takes."""
    box = Box(house, model)
    words = {f"d{n}": prompt(length, n) for n, length in enumerate((5, 64, 90))}
    decoding = tuple(words)
    for name in decoding:
        box.start(name, words[name], sampling)
    beside = {f"p{n}": prompt(length, 50 + n) for n, length in enumerate((11, 64, 200))}
    for name in beside:
        box.add(name, beside[name], sampling)

    done, ended = box.turn(*decoding, prompts=tuple(beside), chunk=chunk)

    assert [report.request for report in done] == list(beside)
    assert all(isinstance(report, PrefillDone) for report in done)
    assert ended.steps == -(-275 // chunk)
    for name in decoding:
        assert len(box.outputs[name]) == min(LENGTH, 1 + ended.steps)
    assert [len(box.outputs[name]) for name in beside] == [1, 1, 1]
    outputs = box.finish()
    words |= beside
    expected = plain_vllm(model, list(words.values()), [sampling] * len(words))
    assert outputs == dict(zip(words, expected, strict=True))


def test_the_prefix_cache_shortens_a_prompt(box: Box) -> None:
    """What was computed once is not computed beside a turn, for the same tokens."""
    box.start("r", prompt(20, 200))
    box.start("first", prompt(110))
    first = box.finish()["first"]
    box.start("s", prompt(20, 300))

    box.add("again", prompt(110))
    (done,), ended = box.turn("s", prompts=("again",))

    assert isinstance(done, PrefillDone)
    assert ended.steps == 1  # three blocks of 32 are there, 14 tokens are not
    assert box.finish()["again"] == first


def test_a_cap_too_small_for_the_prompt(box: Box, plain_vllm: Baseline) -> None:
    """It is deferred with nothing kept, the turn has its step, and the prompt can come again."""
    words = {"r": prompt(20), "p": prompt(500, 100)}
    box.start("r", words["r"])
    box.add("p", words["p"])
    cap = box.engine.kv.group_slabs
    used = box.engine._cache.pool.used

    (report,), ended = box.turn("r", prompts=("p",), slabs=cap)

    assert isinstance(report, PrefillDeferred)
    assert (report.request, report.kv_slabs, ended.kv_slabs, ended.steps) == ("p", cap, cap, 1)
    assert box.engine._cache.pool.used == used
    (report,), _ = box.turn("r", prompts=("p",), chunk=64)
    assert isinstance(report, PrefillDone)
    assert list(box.finish().values()) == plain_vllm(MODEL, list(words.values()), [GREEDY] * 2)


def test_a_cap_that_is_reached_with_a_prompt(box: Box, plain_vllm: Baseline) -> None:
    """Who decodes has no further block, and waits for the prompt, which has all of its own."""
    shape = box.engine.kv
    groups = 2
    room = groups * shape.group_blocks * shape.block_tokens
    # Two blocks for who decodes, less 5 tokens; all others are the prompt's.
    words = {"r": prompt(2 * shape.block_tokens - 5), "p": prompt(room - 64, 100)}
    box.start("r", words["r"])
    box.add("p", words["p"])

    (report,), ended = box.turn("r", prompts=("p",), slabs=groups * shape.group_slabs)

    assert isinstance(report, PrefillDone)
    assert report.kv_slabs == groups * shape.group_slabs
    assert (ended.reason, ended.steps) == (TurnEnd.KV_FULL, -(-(room - 64) // 16))
    assert len(box.outputs["r"]) == 1 + 5
    assert list(box.finish().values()) == plain_vllm(MODEL, list(words.values()), [GREEDY] * 2)


@pytest.mark.parametrize("released", ["p", "r"])
def test_a_release_in_a_mixed_turn(box: Box, plain_vllm: Baseline, released: str) -> None:
    """A prompt or who decodes beside it goes in the midst of it; the other one does not notice, and
    what is cached of who is gone is good."""
    words = {"r": prompt(40), "p": prompt(150, 100)}
    box.start("r", words["r"])
    box.add("p", words["p"], SEEDED)

    def release(report: frames.Tokens) -> None:
        if len(box.outputs["r"]) == 4:
            box.mailbox.put(box.release(released))

    box.on_tokens = release
    (report,), ended = box.turn("r", prompts=("p",))
    box.on_tokens = lambda report: None

    assert isinstance(report, PrefillDone)
    assert ended.steps == {"p": 4, "r": 10}[released]
    assert not box.engine.knows(released)
    box.outputs.pop(released, None)
    box.start(released, words[released], {"p": SEEDED, "r": GREEDY}[released])
    outputs = box.finish()
    expected = plain_vllm(MODEL, list(words.values()), [GREEDY, SEEDED])
    assert [outputs["r"], outputs["p"]] == expected


def test_preempting_finishes_the_prompt_that_has_begun(box: Box, plain_vllm: Baseline) -> None:
    """The next one is deferred, and comes later."""
    words = {"r": prompt(40), "p": prompt(100, 100), "q": prompt(30, 200)}
    box.start("r", words["r"])
    box.add("p", words["p"])
    box.add("q", words["q"])
    box.on_tokens = lambda report: box.mailbox.put(Preempt(instance=0, turn=1))

    (first, second), ended = box.turn("r", prompts=("p", "q"))

    assert isinstance(first, PrefillDone)
    assert isinstance(second, PrefillDeferred)
    assert (ended.reason, ended.steps) == (TurnEnd.PREEMPTED, 7)
    (again,), _ = box.turn("r", "p", prompts=("q",))
    assert isinstance(again, PrefillDone)
    assert list(box.finish().values()) == plain_vllm(MODEL, list(words.values()), [GREEDY] * 3)


def test_a_prompt_that_resumes_an_output(box: Box, plain_vllm: Baseline) -> None:
    """Prompt and output so far, after a loss, are computed beside others like a prompt."""
    words = {"r": prompt(40), "p": prompt(70, 100)}
    expected = plain_vllm(MODEL, list(words.values()), [GREEDY, SEEDED])
    box.start("r", words["r"])
    sofar = tuple(expected[1][:20])
    lost = sequence(MODEL, "p", words["p"], SEEDED, sofar)
    box.carry_out(frames.AddSequence(lost))

    _, ended = box.turn("r", prompts=("p",))

    assert ended.steps == 6
    outputs = box.finish()
    assert [outputs["r"], [*sofar, *outputs["p"]]] == expected


def test_a_mixed_step_that_fails(
    box: Box, plain_vllm: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed of its requests then, and all can be computed again."""
    words = {"r": prompt(40), "p": prompt(70, 100)}
    engine = box.engine
    box.start("r", words["r"], SEEDED)
    box.add("p", words["p"], SEEDED)
    engine.begin_prefill("p", PLENTY)
    box.outputs["r"] += tokens(engine.step(["r"], PLENTY, ["p"], 64))

    def fail() -> None:
        raise OSError("in the midst of it")

    with monkeypatch.context() as patched:
        patched.setattr(engine._core.model_executor, "execute_model", lambda *_, **__: fail())
        with pytest.raises(OSError, match="midst"):
            engine.step(["r"], PLENTY, ["p"], 64)

    for name in words:
        box.outputs.setdefault(name, []).extend(tokens(engine.prefill(name, PLENTY)))
    outputs = box.finish()
    assert [outputs["r"], outputs["p"]] == plain_vllm(MODEL, list(words.values()), [SEEDED] * 2)


def test_nothing_is_unmapped_while_it_may_be_computed(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU may still be at a step that failed half way, or empty the blocks of a prompt that has
    begun. A CPU is not, but is asked as well."""
    engine, region = box.engine, box.engine._cache.region
    events: list[str] = []
    vacate = region.vacate
    monkeypatch.setattr(engine._device, "settle", lambda: events.append("settle"))
    monkeypatch.setattr(region, "vacate", lambda slots: (events.append("vacate"), vacate(slots)))
    box.add("p", prompt(70))
    engine.begin_prefill("p", PLENTY)
    engine.forget("p")
    engine.trim(0)
    forgotten = events[:]
    del events[:]

    box.add("f", prompt(70))
    with monkeypatch.context() as patched:
        patched.setattr(engine._core.model_executor, "execute_model", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.prefill("f", PLENTY)
    engine.trim(0)
    engine.forget("f")

    for seen in (forgotten, events):
        assert "vacate" in seen
        assert "settle" in seen[: seen.index("vacate")]


def test_weights_are_vacated_once_nothing_computes(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread unmaps them, and asks no device whether it is still at a step."""
    engine, region = box.engine, box.engine._placed.weights.region
    events: list[str] = []
    vacate = region.vacate
    monkeypatch.setattr(engine._device, "settle", lambda: events.append("settle"))
    monkeypatch.setattr(region, "vacate", lambda slots: (events.append("vacate"), vacate(slots)))

    engine.evict_weights()

    assert events == ["settle", "vacate"]
    engine.begin_load().wait()


def test_wrong_calls_are_refused(box: Box) -> None:
    """Calls out of order raise before anything is touched."""
    engine = box.engine
    box.start("r", prompt(20))
    box.add("p", prompt(70, 100))
    with pytest.raises(ValueError, match="has not begun"):
        engine.step(["r"], PLENTY, ["p"], 16)
    engine.begin_prefill("p", PLENTY)
    assert engine.tokens_left("p") == 70
    with pytest.raises(ValueError, match="computed already"):
        engine.begin_prefill("p", PLENTY)
    with pytest.raises(ValueError, match="chunks of 0"):
        engine.step(["r"], PLENTY, ["p"])
    with pytest.raises(ValueError, match="is not computed"):
        engine.step(["p"], PLENTY)
    with pytest.raises(ValueError, match="17 requests"):
        engine.step(["r"], PLENTY, ["p"] * 16, 16)
    assert len(engine.step(["r"], PLENTY, ["p"], 70)) == 2
    engine.forget("r")
    engine.forget("p")
