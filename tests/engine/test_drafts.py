"""Drafts by n-grams: the tokens of plain vLLM without drafts, in fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appliance.checkpoints.drafts import Speculation
from appliance.checkpoints.families import UnsupportedModel
from appliance.engines.protocol import DraftUse, KvExhausted, Produced
from appliance.engines.vllm.drafts import ngram
from appliance.engines.vllm.drafts.ngram import look_up
from appliance.vocabulary import FinishReason
from tests.configs import CONFIGS
from tests.engine.conftest import plain_process
from tests.engine.house import (
    EOS,
    House,
    PlainAnswers,
    Sampling,
    make_checkpoint,
    make_house,
    sequence,
)
from tests.engine.player import Player, prompts
from tests.engine.shrunken import make_shrunken

MODEL = "llama-mha"
SLABS = 48
LENGTH = 80
GREEDY = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
SEEDED = GREEDY | {"temperature": 0.3, "top_p": 0.9, "min_p": 0.02, "seed": 7}
PENALISED = GREEDY | {"repetition_penalty": 1.2, "presence_penalty": 0.1}
DRAFTS = Speculation(tokens=6, prompt_lookup_min=2, prompt_lookup_max=4)
REPETITIVE = (*range(10, 22), *range(10, 22), *range(10, 22), 10, 11, 12)
PROMPTS = [REPETITIVE, tuple(3 + i * 7 % 400 for i in range(90)), (5,) * 32, (7, 8, 9)]
KINDS = [
    "granite-3.1-3b-a800m-instruct",
    "deepseek-v3-bf16",
    "gemma-3-1b-it",
    "gemma-3n-e2b-text",
]
STATE = "falcon-h1-1.5b-instruct"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose output goes in circles, and leaves them again."""
    return make_checkpoint(tmp_path_factory.mktemp("circles"), MODEL, initializer_range=0.05)


@pytest.fixture(scope="module")
def _house(path: str) -> House:
    house = make_house()
    house.build(MODEL, path, speculation=DRAFTS)
    return house


@pytest.fixture
def drafting(_house: House) -> Iterator[House]:
    """An engine that drafts; empty before and after every test."""
    yield _house
    _house.idle()


@pytest.fixture(scope="module")
def greedy(path: str, plain_answers: PlainAnswers) -> list[list[int]]:
    """What plain vLLM adds to each prompt."""
    return plain(path, plain_answers, [GREEDY] * len(PROMPTS))


def plain(path: str, answers: PlainAnswers, sampling: list[Sampling]) -> list[list[int]]:
    told = answers(path, "float32", PROMPTS[: len(sampling)], sampling)
    return [one["sequences"][0] for one in told]


class Decoding:
    """Requests of which all stays on the device."""

    def __init__(self, house: House, sampling: list[Sampling], model: str = MODEL) -> None:
        """One of each prompt."""
        self.model = model
        self.engine: Any = house.engines[model]
        self.engine.begin_load().wait()
        self.before: DraftUse = self.engine.draft_use()
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.live: list[str] = []
        self.steps = 0
        for number, asked in enumerate(sampling):
            self.begin(str(number), PROMPTS[number], asked)

    @property
    def use(self) -> DraftUse:
        now = self.engine.draft_use()
        return DraftUse(now.drafted - self.before.drafted, now.accepted - self.before.accepted)

    def add(self, name: str, prompt: tuple[int, ...], asked: Sampling) -> None:
        self.outputs[name] = []
        self.engine.add(sequence(self.model, name, prompt, asked))

    def begin(self, name: str, prompt: tuple[int, ...], asked: Sampling) -> None:
        self.add(name, prompt, asked)
        self.live = [*self.live, name]
        self.take(self.engine.prefill(name, SLABS))

    def step(self, *prompts: str, chunk: int = 0) -> None:
        self.take(self.engine.step(self.live, SLABS, prompts, chunk))
        self.steps += 1
        for name in self.live:
            self.engine._resident(name)  # its blocks are those of its computed tokens

    def take(self, produced: list[Produced]) -> None:
        for one in produced:
            assert one.request not in self.ended, "a token behind the last"
            self.outputs[one.request].append(one.token)
            if one.finished is not None:
                self.ended[one.request] = one.finished
        self.live = [name for name in self.live if name not in self.ended]

    def finish(self) -> list[list[int]]:
        while self.live:
            self.step()
        return list(self.outputs.values())


def test_a_batch_takes_fewer_steps(drafting: House, greedy: list[list[int]]) -> None:
    decoding = Decoding(drafting, [GREEDY] * len(PROMPTS))
    assert decoding.finish() == greedy
    assert set(decoding.ended.values()) == {FinishReason.LENGTH}
    use = decoding.use
    assert 0 < use.accepted < use.drafted, "some drafts were right, and some wrong"
    assert use.accepted > LENGTH

    alone = Decoding(drafting, [GREEDY])
    assert alone.finish() == greedy[:1]
    assert alone.steps + alone.use.accepted == LENGTH - 1
    assert alone.steps < LENGTH / 2


def test_turns_of_which_nothing_stays(drafting: House, greedy: list[list[int]]) -> None:
    before = drafting.engines[MODEL].draft_use().accepted
    player = Player(drafting, MODEL, GREEDY, PROMPTS)
    while player.live:
        player.turn(3, SLABS)
    assert list(player.outputs.values()) == greedy
    assert drafting.engines[MODEL].draft_use().accepted > before


def test_others_of_the_batch_draw_as_without_drafts(
    drafting: House, path: str, plain_answers: PlainAnswers, greedy: list[list[int]]
) -> None:
    """Neither seeded ones nor those with penalties have drafts, but are in steps with drafts."""
    asked = [GREEDY, SEEDED, PENALISED, GREEDY]
    decoding = Decoding(drafting, asked)
    assert decoding.finish() == plain(path, plain_answers, asked)
    assert decoding.use.accepted

    alone = Decoding(drafting, [SEEDED, PENALISED])
    alone.finish()
    assert alone.use == DraftUse(0, 0)


def test_a_seeded_request_goes_on_elsewhere(
    drafting: House, path: str, plain_answers: PlainAnswers
) -> None:
    """Added with its output so far, as after the death of a worker."""
    (expected,) = plain(path, plain_answers, [SEEDED])
    engine = drafting.engines[MODEL]
    engine.begin_load().wait()
    so_far = tuple(expected[:33])
    engine.add(sequence(MODEL, "again", PROMPTS[0], SEEDED, so_far))
    produced = engine.prefill("again", SLABS)
    while produced[-1].finished is None:
        produced += engine.step(["again"], SLABS)
    assert [*so_far, *(one.token for one in produced)] == expected


@pytest.mark.parametrize(
    "special",
    [
        {"logit_bias": {5: 3.0}},
        {"bad_words_token_ids": [[4], [52, 52]]},
        {"allowed_token_ids": list(range(3, 90))},
        {"min_tokens": 9, "ignore_eos": False, "logit_bias": {EOS: 9.0}},
        {"structured_outputs": {"regex": "[ab]{40}"}},
        {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 4}},
        {"logprobs": 2},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_special_requests_have_no_drafts(
    drafting: House,
    path: str,
    plain_answers: PlainAnswers,
    greedy: list[list[int]],
    special: Sampling,
) -> None:
    """Others have them in the same steps, except where log probabilities are wanted."""
    asked = GREEDY | {"max_tokens": 40} | special
    decoding = Decoding(drafting, [asked])
    decoding.finish()
    assert not decoding.use.drafted

    decoding = Decoding(drafting, [GREEDY])
    decoding.begin("special", PROMPTS[0], asked)
    while "special" in decoding.live:
        decoding.step()
    assert bool(decoding.use.accepted) is ("logprobs" not in special)
    if "structured_outputs" in special:
        assert set(decoding.outputs["special"]) <= {68, 69}
    else:
        assert [decoding.outputs["special"]] == plain(path, plain_answers, [asked])
    assert decoding.finish()[0] == greedy[0]
    assert decoding.use.accepted


def test_an_answer_ends_within_a_draft(
    drafting: House, path: str, plain_answers: PlainAnswers, greedy: list[list[int]]
) -> None:
    """By its length, by a stop token, and by the end of the context: wherever in a circle."""
    for length in range(30, 38):
        decoding = Decoding(drafting, [GREEDY | {"max_tokens": length}] * 2)
        assert decoding.finish() == [output[:length] for output in greedy[:2]]
        assert set(decoding.ended.values()) == {FinishReason.LENGTH}
    seen = greedy[0]
    for stop in list(dict.fromkeys(seen))[2:8]:
        decoding = Decoding(drafting, [GREEDY | {"stop_token_ids": [stop]}])
        assert decoding.finish() == [seen[: seen.index(stop) + 1]]
        assert decoding.ended == {"0": FinishReason.STOP}


def test_an_answer_ends_with_the_context(
    drafting: House, path: str, plain_answers: PlainAnswers
) -> None:
    prompt = (REPETITIVE * 30)[:1000]
    asked = GREEDY | {"max_tokens": 500}
    decoding = Decoding(drafting, [])
    decoding.begin("long", prompt, asked)
    (told,) = plain_answers(path, "float32", [prompt], [asked])
    assert decoding.finish() == told["sequences"]
    assert decoding.ended == {"long": FinishReason.LENGTH}


def test_a_drafted_stop_token_counts_as_accepted(drafting: House, greedy: list[list[int]]) -> None:
    seen = greedy[0]
    extra = set()
    for begun in range(50, 58):
        said, rest = seen[:begun], seen[begun:]
        stop = rest[2]
        decoding = Decoding(drafting, [])
        decoding.begin("0", (*REPETITIVE, *said), GREEDY | {"stop_token_ids": [stop]})
        (output,) = decoding.finish()
        assert output == rest[: rest.index(stop) + 1]
        # Each step gives a token that was not drafted, but for one that ends within its draft.
        extra.add(decoding.steps + decoding.use.accepted - (len(output) - 1))
    assert extra == {0, 1}


def test_large_batches_share_what_a_step_may_draft(
    drafting: House, greedy: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram, "STEP_DRAFTS", 4)
    decoding = Decoding(drafting, [GREEDY] * 2)
    drafted = 0
    while decoding.live:
        decoding.step()
        assert decoding.use.drafted - drafted <= 4
        drafted = decoding.use.drafted
    assert drafted
    assert list(decoding.outputs.values()) == greedy[:2]


def test_prompts_are_computed_in_steps_with_drafts(
    drafting: House, greedy: list[list[int]]
) -> None:
    decoding = Decoding(drafting, [GREEDY])
    while not decoding.use.accepted:
        decoding.step()
    decoding.add("1", PROMPTS[1], GREEDY)
    decoding.engine.begin_prefill("1", SLABS)
    before = decoding.use.drafted
    while decoding.engine.tokens_left("1") > 1 and not decoding.outputs["1"]:
        decoding.step("1", chunk=11)
    assert decoding.use.drafted > before
    decoding.live = [*decoding.live, "1"]
    assert decoding.finish() == greedy[:2]


def test_no_room_and_a_failed_step(drafting: House, greedy: list[list[int]]) -> None:
    decoding = Decoding(drafting, [GREEDY] * 2)
    engine, slabs = decoding.engine, decoding.engine.trim().slabs
    exhausted = False
    while not exhausted:
        try:
            decoding.take(engine.step(decoding.live, slabs))
        except KvExhausted:
            exhausted = True
    decoding.step()

    def fail(**_: object) -> None:
        raise RuntimeError("a defect")

    model = engine._runner.model
    compute, model.forward = model.forward, fail
    try:
        with pytest.raises(RuntimeError, match="a defect"):
            engine.step(decoding.live, SLABS)
    finally:
        model.forward = compute
    for name in decoding.live:
        decoding.take(engine.prefill(name, SLABS))
    assert decoding.finish() == greedy[:2]


@pytest.fixture(scope="module")
def other_plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainAnswers]:
    """Of a process whose first model has experts: vLLM has no others in it after one without."""
    path = make_shrunken(tmp_path_factory.mktemp("first"), KINDS[0], CONFIGS[KINDS[0]])
    with plain_process() as answers:
        answers(path, "float32", [(3, 4, 5)], [Sampling(max_tokens=1)])
        yield answers


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_models(tmp_path: Path, other_plain: PlainAnswers, name: str) -> None:
    """Experts, compressed KV in blocks of 16 tokens, windows, and layers that read the KV of
    others; nothing stays between turns."""
    path = make_shrunken(tmp_path, name, CONFIGS[name])
    house = make_house()
    often = Speculation(tokens=6, prompt_lookup_min=1, prompt_lookup_max=4)
    engine = house.build(name, path, dtype="float32", speculation=often)
    asked = [REPETITIVE, *prompts(name)[1:]]
    sampling = GREEDY | {"max_tokens": 48}
    player = Player(house, name, sampling, asked)
    while player.live:
        player.turn(3, SLABS)
    told = other_plain(path, "float32", asked, [sampling] * len(asked))
    assert list(player.outputs.values()) == [one["sequences"][0] for one in told]
    assert engine.draft_use().accepted
    engine.retire()


def test_the_longest_tail_that_stood_before_counts() -> None:
    """The first time that it did, as in vLLM; compared with looking at every place."""
    drawn = np.random.default_rng(3)
    for size in (1, 2, 3, 5, 9, *[40] * 60):
        tokens = drawn.integers(0, 3, size).astype(np.int32)
        for low, high in ((1, 1), (1, 3), (2, 5), (4, 4)):
            expected: list[int] = []
            for length in range(low, min(high, size - 1) + 1):
                for at in range(size - length):
                    if (tokens[at : at + length] == tokens[-length:]).all():
                        expected = tokens[at + length : at + length + 4].tolist()
                        break
            assert look_up(tokens, Speculation(4, low, high)) == expected


def test_a_model_with_states_is_not_built_with_drafts(tmp_path: Path) -> None:
    path = make_shrunken(tmp_path, STATE, CONFIGS[STATE])
    with pytest.raises(UnsupportedModel, match="keep a state"):
        make_house().build(STATE, path, dtype="float32", speculation=DRAFTS)
