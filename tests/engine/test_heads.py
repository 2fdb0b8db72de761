"""Drafts by heads, of a checkpoint (MTP) and in a folder (EAGLE): the tokens of plain vLLM without
drafts, in fewer steps, while the head's weights and KV come and go with those of its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoints.draft_heads import EAGLE_TRIED, MTP_TRIED, UnsupportedHead
from appliance.checkpoints.drafts import MOST_DRAFTED, Speculation
from appliance.engines.protocol import DraftUse, KvExhausted, Verdict
from tests.configs import CONFIGS
from tests.engine.conftest import plain_process
from tests.engine.heads import OWN_HEADS, TARGET, make_eagle, make_target, make_with_head
from tests.engine.house import House, PlainAnswers, Sampling, make_house, sequence
from tests.engine.player import Player
from tests.engine.test_drafts import GREEDY, LENGTH, PENALISED, PROMPTS, SEEDED, SLABS, Decoding

TOKENS = 4
KINDS = (*OWN_HEADS, "eagle", "eagle3")
PLAIN = "plain"
POOL_SLABS = 128


class Drafting:
    """A model with a head."""

    def __init__(self, kind: str, path: str, head: str) -> None:
        self.path = path
        self.speculation = Speculation(TOKENS, method="mtp" if not head else kind, path=head)
        self.house = self.another_house()

    def another_house(self) -> House:
        house = make_house(POOL_SLABS)
        house.build("model", self.path, dtype="float32", speculation=self.speculation)
        return house

    def decode(self, sampling: list[Sampling]) -> Decoding:
        return Decoding(self.house, sampling, "model")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drafting]:
    """By kind."""
    folder = tmp_path_factory.mktemp("heads")
    found = {kind: Drafting(kind, make_with_head(folder, kind), "") for kind in OWN_HEADS}
    target = make_target(folder)
    for kind in ("eagle", "eagle3"):
        found[kind] = Drafting(kind, target, make_eagle(folder, target, kind))
    return found


@pytest.fixture(params=KINDS)
def drafting(made: dict[str, Drafting], request: pytest.FixtureRequest) -> Iterator[Drafting]:
    """Of each kind; its engine is empty before and after every test."""
    yield made[request.param]
    made[request.param].house.idle()


@pytest.fixture
def eagle(made: dict[str, Drafting]) -> Iterator[Drafting]:
    """One whose guesses depend on its KV."""
    yield made["eagle"]
    made["eagle"].house.idle()


@pytest.fixture(scope="module")
def undisturbed(made: dict[str, Drafting]) -> Iterator[PlainAnswers]:
    """Plain vLLM, in whose process the first model has experts, as it has to."""
    with plain_process() as answers:
        answers(made[KINDS[0]].path, "float32", [(3, 4, 5)], [Sampling(max_tokens=1)])
        yield answers


def plain(drafting: Drafting, answers: PlainAnswers, sampling: list[Sampling]) -> list[list[int]]:
    told = answers(drafting.path, "float32", PROMPTS[: len(sampling)], sampling)
    return [one["sequences"][0] for one in told]


def test_every_kind_that_may_draft_is_tested() -> None:
    tried = {CONFIGS[name]["architectures"][0] for name in OWN_HEADS}
    assert tried == MTP_TRIED
    assert {"LlamaForCausalLM"} == EAGLE_TRIED
    assert TARGET.startswith("llama")


def test_a_batch_takes_fewer_steps(drafting: Drafting, undisturbed: PlainAnswers) -> None:
    decoding = drafting.decode([GREEDY] * len(PROMPTS))
    assert decoding.finish() == plain(drafting, undisturbed, [GREEDY] * len(PROMPTS))
    use = decoding.use
    assert 0 < use.accepted < use.drafted, "some drafts were right, and some wrong"
    assert decoding.steps < LENGTH - 1


def test_turns_of_which_nothing_stays(drafting: Drafting, undisturbed: PlainAnswers) -> None:
    """Weights and KV, the head's among them, leave every three steps; then the worker is killed."""
    engine = drafting.house.engines["model"]
    before = engine.draft_use().accepted
    player = Player(drafting.house, "model", GREEDY, PROMPTS)
    for _ in range(4):
        player.turn(3, SLABS)
    assert engine.draft_use().accepted > before
    assert player.live
    other = drafting.another_house()
    player.lose(other)
    while player.live:
        player.turn(3, SLABS)
    expected = plain(drafting, undisturbed, [GREEDY] * len(PROMPTS))
    assert list(player.outputs.values()) == expected
    assert other.engines["model"].draft_use().accepted
    other.engines["model"].retire()


def test_the_head_is_part_of_the_models_weights_and_kv(
    drafting: Drafting, undisturbed: PlainAnswers
) -> None:
    alone = make_house(POOL_SLABS).build(PLAIN, drafting.path, dtype="float32")
    engine = drafting.house.engines["model"]
    layers = len(list(engine._runner.kv_caches))
    assert engine.kv.block_bytes * (layers - 1) == alone.kv.block_bytes * layers
    assert engine.kv.block_tokens == alone.kv.block_tokens
    assert engine.weight_slabs > alone.weight_slabs
    assert engine.layout_digest != alone.layout_digest
    engine.begin_load().wait()
    assert engine.verify() is Verdict.OK
    alone.retire()


def test_what_the_head_keeps_comes_back_with_the_rest(eagle: Drafting) -> None:
    """What it guesses after a swap, and with weights that were away, is what it guesses without."""
    engine = eagle.house.engines["model"]

    def guesses(swaps: bool) -> list[list[int]]:
        found = []
        engine.begin_load().wait()
        engine.add(sequence("model", "one", PROMPTS[1], GREEDY))
        places = eagle.house.swap_places(engine, len(PROMPTS[1]) + LENGTH)
        produced = engine.prefill("one", SLABS)
        while produced[-1].finished is None:
            found.append(list(engine._scheduler.requests["one"].spec_token_ids))
            if swaps:
                eagle.house.swap_out(engine, "one", places)
                engine.trim(0)
                engine.evict_weights()
                engine.begin_load().wait()
                engine.swap_in("one", places, SLABS)
            produced = engine.step(["one"], SLABS)
        engine.trim(0)
        return found

    assert guesses(swaps=True) == guesses(swaps=False)


def test_drafts_stay_within_the_block(drafting: Drafting, undisturbed: PlainAnswers) -> None:
    """Whatever is behind a block belongs to others. A request whose block is full has a draft of
    one token: the head had no place for what it would have computed for a second one."""
    decoding = drafting.decode([GREEDY] * len(PROMPTS))
    engine = decoding.engine
    size, at_the_end = engine.kv.block_tokens, set()
    while decoding.live:
        decoding.step()
        for name in decoding.live:
            known = engine._scheduler.requests[name]
            left = -known.num_computed_tokens % size
            draft = len(known.spec_token_ids)
            assert 0 < draft <= TOKENS
            if not left:
                at_the_end.add(draft)
    assert at_the_end == {1}
    expected = plain(drafting, undisturbed, [GREEDY] * len(PROMPTS))
    assert list(decoding.outputs.values()) == expected


def test_others_of_the_batch_draw_as_without_drafts(
    drafting: Drafting, undisturbed: PlainAnswers
) -> None:
    """Neither seeded ones nor those with penalties have drafts, but are in steps with drafts."""
    asked = [GREEDY, SEEDED, PENALISED, GREEDY]
    decoding = drafting.decode(asked)
    assert decoding.finish() == plain(drafting, undisturbed, asked)
    assert decoding.use.accepted

    alone = drafting.decode([SEEDED, PENALISED])
    alone.finish()
    assert alone.use == DraftUse(0, 0)


def test_prompts_in_chunks_and_shared_prefixes(
    drafting: Drafting, undisturbed: PlainAnswers
) -> None:
    """In steps with drafts; the second of two equal prompts finds blocks in the prefix cache, where
    vLLM has one on CPUs."""
    decoding = drafting.decode([GREEDY])
    caches = decoding.engine._scheduler.blocks.enable_caching
    while not decoding.use.accepted:
        decoding.step()
    for name in ("1", "again"):
        decoding.add(name, PROMPTS[1], GREEDY)
        decoding.engine.begin_prefill(name, SLABS)
        left = decoding.engine.tokens_left(name)
        assert (left < len(PROMPTS[1])) is (caches and name == "again")
        while not decoding.outputs[name]:
            decoding.step(name, chunk=11)
        decoding.live = [*decoding.live, name]
    first, *others = decoding.finish()
    expected = plain(drafting, undisturbed, [GREEDY] * 2)
    assert first == expected[0]
    assert others == [expected[1]] * 2


def test_a_step_begins_before_the_head_is_there(eagle: Drafting) -> None:
    """Weights land while a prompt is computed; the head, which is last, waits for its own."""
    engine = eagle.house.engines["model"]
    engine.begin_load()
    engine.add(sequence("model", "early", PROMPTS[0], GREEDY))
    early = engine.prefill("early", SLABS)
    assert engine._placed.weights.transfer.done
    guessed = list(engine._scheduler.requests["early"].spec_token_ids)
    engine.add(sequence("model", "late", PROMPTS[0], GREEDY, cache_salt="another"))
    late = engine.prefill("late", SLABS)
    assert [one.token for one in early] == [one.token for one in late]
    assert engine._scheduler.requests["late"].spec_token_ids == guessed
    for name in ("early", "late"):
        engine.forget(name)


def test_no_room_and_a_failed_step(eagle: Drafting, undisturbed: PlainAnswers) -> None:
    decoding = eagle.decode([GREEDY] * 2)
    engine, slabs = decoding.engine, decoding.engine.trim().slabs
    exhausted = False
    while not exhausted:
        try:
            decoding.take(engine.step(decoding.live, slabs))
        except KvExhausted:
            exhausted = True
    decoding.step()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    head: Any = engine._runner.drafter.model
    compute, head.forward = head.forward, fail
    try:
        with pytest.raises(RuntimeError, match="a defect"):
            engine.step(decoding.live, SLABS)
    finally:
        head.forward = compute
    for name in decoding.live:
        decoding.take(engine.prefill(name, SLABS))
    assert decoding.finish() == plain(eagle, undisturbed, [GREEDY] * 2)


@pytest.mark.parametrize("kind", ["eagle", OWN_HEADS[1]])
def test_an_answer_ends_with_the_context(
    made: dict[str, Drafting], undisturbed: PlainAnswers, kind: str
) -> None:
    """Where a whole draft could go beyond it, vLLM's head drafts for none of the batch."""
    prompt = (PROMPTS[1] * 12)[:1000]
    asked = GREEDY | {"max_tokens": 500}
    decoding = made[kind].decode([])
    decoding.begin("long", prompt, asked)
    (told,) = undisturbed(made[kind].path, "float32", [prompt], [asked])
    assert decoding.finish() == told["sequences"]
    made[kind].house.idle()


def test_long_drafts(made: dict[str, Drafting], undisturbed: PlainAnswers) -> None:
    """As long as the blocks of compressed KV."""
    path = made[OWN_HEADS[1]].path
    longest = Speculation(MOST_DRAFTED, method="mtp")
    house = make_house(POOL_SLABS)
    engine = house.build("longest", path, dtype="float32", speculation=longest)
    decoding = Decoding(house, [GREEDY] * 2, "longest")
    assert decoding.finish() == plain(made[OWN_HEADS[1]], undisturbed, [GREEDY] * 2)
    assert decoding.use.accepted
    engine.retire()


def test_a_head_that_is_not_there(tmp_path: Path) -> None:
    path = make_target(tmp_path)
    with pytest.raises(UnsupportedHead, match="no head in the checkpoint"):
        make_house().build(TARGET, path, speculation=Speculation(2, method="mtp"))
