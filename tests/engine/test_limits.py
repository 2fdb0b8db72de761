"""What an engine does at its limits: too few slabs, ends of requests, wrong calls."""

from __future__ import annotations

import pytest

from appliance.engines.protocol import KvExhausted
from appliance.memory.arena import PoolExhausted
from appliance.vocabulary import FinishReason
from tests.engine.house import EOS, SLAB, VOCAB, House, Sampling, sequence, tokens

MODEL = "llama-mha"
GREEDY = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(3 + i % 400 for i in range(length))


def test_exhausted_step_changes_nothing(house: House) -> None:
    """A step beyond the allowed slabs is refused; with more slabs the request goes on."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    allowed = engine.kv.group_slabs
    engine.add(sequence(MODEL, "free", prompt(150), GREEDY))
    expected = tokens(engine.prefill("free", 90))
    while len(expected) < 200:
        expected += tokens(engine.step(["free"], 90))
    engine.trim(0)

    engine.add(sequence(MODEL, "tight", prompt(150), GREEDY))
    output = tokens(engine.prefill("tight", allowed))
    room = engine.kv.group_blocks * engine.kv.block_tokens
    while 150 + len(output) <= room:
        output += tokens(engine.step(["tight"], allowed))
    before = (house.arena.usage(), engine._cache.pool.used)
    with pytest.raises(KvExhausted):
        engine.step(["tight"], allowed)
    assert (house.arena.usage(), engine._cache.pool.used) == before
    while len(output) < 200:
        output += tokens(engine.step(["tight"], 90))

    assert output == expected


def test_exhausted_prefill_keeps_nothing(house: House) -> None:
    """A prompt that does not fit leaves no block behind, and can be computed later."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    engine.add(sequence(MODEL, "r", prompt(500), GREEDY))

    with pytest.raises(KvExhausted):
        engine.prefill("r", engine.kv.group_slabs)

    assert engine.trim().slabs == 0
    assert tokens(engine.prefill("r", 90))
    engine.forget("r")


def test_exhausted_swap_in_keeps_nothing(house: House) -> None:
    """KV that does not fit stays in the host tier, and can come in later."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    engine.add(sequence(MODEL, "r", prompt(500), GREEDY))
    engine.prefill("r", 90)
    places = house.swap_places(engine, 500)
    house.swap_out(engine, "r", places)
    engine.trim(0)

    with pytest.raises(KvExhausted):
        engine.swap_in("r", places, engine.kv.group_slabs)

    assert engine.trim().slabs == 0
    engine.swap_in("r", places, 90)
    assert tokens(engine.step(["r"], 90))
    engine.forget("r")


def test_other_owners_exhaust_the_pool(house: House) -> None:
    """What others have mapped is not there, whatever the model is allowed."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    other = house.arena.reserve("other", house.arena.free)
    other.map(range(other.slots))
    try:
        engine.add(sequence(MODEL, "r", prompt(40), GREEDY))
        with pytest.raises(KvExhausted):
            engine.prefill("r", 90)
        with pytest.raises(PoolExhausted):
            house.engines["qwen2-gqa"].begin_load().wait()
        assert not house.engines["qwen2-gqa"]._placed.weights.loaded
    finally:
        other.release()
        engine.forget("r")


def test_trim_gives_slabs_back(house: House) -> None:
    """Slabs stay while a block in them is used, or cold and not to be given up."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    for name, length in (("long", 600), ("short", 10)):
        engine.add(sequence(MODEL, name, prompt(length), GREEDY))
        engine.prefill(name, 90)
    mapped = house.arena.usage()[f"kv:{MODEL}"]

    engine.forget("long")
    assert engine.trim().slabs == mapped
    kept = engine.trim(0).slabs

    assert kept == engine.kv.group_slabs == house.arena.usage()[f"kv:{MODEL}"] < mapped
    assert house.arena.slab_bytes == SLAB
    engine.forget("short")


def test_shape_keeps_its_promise(house: House) -> None:
    """`group_slabs` slabs hold at least `group_blocks` blocks, for every KV shape."""
    for engine in house.engines.values():
        for groups in (1, 2, 3):
            engine._cache.pool.ensure(
                groups * engine.kv.group_blocks, groups * engine.kv.group_slabs
            )
            assert engine._cache.pool.mapped_slabs <= groups * engine.kv.group_slabs
            engine.trim()
    assert len({engine.kv for engine in house.engines.values()}) == len(house.engines)


def test_ends(house: House) -> None:
    """Requests end by the model's end token, by a stop token, or by length."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    forced = {EOS: 100.0}
    ends = {
        "eos": (Sampling(max_tokens=9, temperature=0.0, logit_bias=forced), FinishReason.STOP),
        "ignored": (
            Sampling(max_tokens=1, temperature=0.0, logit_bias=forced, ignore_eos=True),
            FinishReason.LENGTH,
        ),
        "stop": (
            Sampling(max_tokens=9, temperature=0.0, logit_bias={77: 100.0}, stop_token_ids=[77]),
            FinishReason.STOP,
        ),
        "length": (Sampling(max_tokens=1, temperature=0.0, ignore_eos=True), FinishReason.LENGTH),
    }
    for name, (sampling, reason) in ends.items():
        engine.add(sequence(MODEL, name, prompt(20), sampling))
        (one,) = engine.prefill(name, 40)
        assert one.finished is reason, name


def test_context_limit_ends_a_request(house: House) -> None:
    """The longest context is filled to its last token, then the request ends by length."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    engine.add(sequence(MODEL, "r", prompt(1020), GREEDY))
    produced = engine.prefill("r", 90)
    while produced[-1].finished is None:
        produced += engine.step(["r"], 90)

    assert len(produced) == 4
    assert produced[-1].finished is FinishReason.LENGTH


def test_many_short_requests_leave_nothing(house: House) -> None:
    """Finished, forgotten and repeated ids leave no state; the fixture checks the dictionaries."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    short = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)
    for number in range(200):
        name = f"r{number % 3}"
        engine.add(sequence(MODEL, name, prompt(5 + number % 40), short))
        engine.prefill(name, 40)
        if number % 2:
            engine.forget(name)
        else:
            (one,) = engine.step([name], 40)
            assert one.finished is FinishReason.LENGTH

    assert engine._cache.pool.used == 0
    assert not engine._scheduler.finished_req_ids
    assert not engine._runner.input_batch.req_id_to_index
    manager = engine._scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    assert not manager.req_to_blocks
    assert not manager.num_cached_block


def test_forget_of_the_unknown_is_fine(house: House) -> None:
    """A release may cross a finish."""
    house.engines[MODEL].forget("nobody")


def test_wrong_calls_are_refused(house: House) -> None:
    """Calls out of order raise before anything is touched."""
    engine = house.engines[MODEL]
    places = house.swap_places(engine, 100)
    engine.add(sequence(MODEL, "r", prompt(20), GREEDY))
    with pytest.raises(RuntimeError, match="not on the device"):
        engine.prefill("r", 40)
    engine.begin_load().wait()
    with pytest.raises(ValueError, match="known already"):
        engine.add(sequence(MODEL, "r", prompt(20), GREEDY))
    with pytest.raises(ValueError, match="not computed"):
        engine.step(["r"], 40)
    with pytest.raises(ValueError, match="no KV elsewhere"):
        engine.swap_in("r", places, 40)
    with pytest.raises(ValueError, match="no room"):
        engine.add(sequence(MODEL, "long", prompt(1024), GREEDY))
    with pytest.raises(ValueError, match="beyond the model's vocabulary"):
        engine.add(sequence(MODEL, "strange", (5, VOCAB), GREEDY))
    engine.prefill("r", 40)
    with pytest.raises(ValueError, match="computed already"):
        engine.prefill("r", 40)
    with pytest.raises(ValueError, match="places"):
        engine.swap_out("r", ())
    engine.swap_out("r", places)
    with pytest.raises(ValueError, match="KV on the device"):
        engine.step(["r"], 40)
    engine.forget("r")
    with pytest.raises(ValueError, match="not known"):
        engine.step(["r"], 40)


def test_batch_changes_between_steps(house: House) -> None:
    """Requests that sit out a step, and a batch in another order, keep their own tokens."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
    names = ["a", "b", "c"]
    alone: dict[str, list[int]] = {}
    for name in names:
        engine.add(sequence(MODEL, name, prompt(20 + ord(name)), sampling))
        alone[name] = tokens(engine.prefill(name, 40))
        while len(alone[name]) < 8:
            alone[name] += tokens(engine.step([name], 40))

    mixed: dict[str, list[int]] = {}
    for name in names:
        engine.add(sequence(MODEL, name, prompt(20 + ord(name)), sampling))
        mixed[name] = tokens(engine.prefill(name, 40))
    for batch in (["a", "b", "c"], ["c", "a"], ["b"], ["b", "c"], ["a", "c", "b"]):
        for one in engine.step(batch, 40):
            mixed[one.request].append(one.token)
    for name in names:
        while len(mixed[name]) < 8:
            mixed[name] += tokens(engine.step([name], 40))

    assert mixed == alone
    assert all(0 <= token < VOCAB for output in mixed.values() for token in output)
