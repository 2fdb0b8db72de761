"""What clients may ask of sampling means what it means in plain vLLM, wherever the request goes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from appliance.engines.protocol import Produced
from appliance.vocabulary import FinishReason
from tests.engine.house import (
    MODELS,
    VOCAB,
    House,
    PlainAnswers,
    Sampling,
    body,
    make_house,
    sequence,
    tokens,
)

MODEL = "qwen2-gqa"
PROMPT = tuple(range(10, 80))
LONG = tuple(3 + (i * 7) % 500 for i in range(601))
"""Its log probabilities take several chunks."""
SLABS = 60
LENGTH = 12
FREE = Sampling(max_tokens=LENGTH, temperature=1.0, seed=4, ignore_eos=True)
GREEDY = FREE | Sampling(temperature=0.0)

ASKED: dict[str, Sampling] = {
    "logprobs of the token": FREE | Sampling(logprobs=0),
    "logprobs": FREE | Sampling(logprobs=5),
    "most logprobs": FREE | Sampling(logprobs=20),
    "logprobs of some tokens": FREE | Sampling(logprob_token_ids=[7, 11, 500]),
    "logit bias": FREE | Sampling(logit_bias={7: 8.0, 11: 8.5, 13: -100.0}, logprobs=2),
    "allowed tokens": FREE | Sampling(allowed_token_ids=[40, 41, 42, 43, 44]),
    "bad words": GREEDY | Sampling(bad_words_token_ids=[[97], [99, 98]], logprobs=3),
    "min tokens": Sampling(max_tokens=LENGTH, seed=3, min_tokens=5, logit_bias={2: 50.0}),
    "stop tokens": Sampling(
        max_tokens=LENGTH, seed=3, min_tokens=3, stop_token_ids=[9, 21], logit_bias={21: 50.0}
    ),
    "ignored end": FREE | Sampling(logit_bias={2: 6.0}, logprobs=1),
    "negative seed": FREE | Sampling(seed=-5, min_p=0.02),
    "seed of zero": FREE | Sampling(seed=0, top_k=30),
    "repetition": GREEDY
    | Sampling(
        logit_bias={21: 90.0},
        repetition_detection={"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 3},
    ),
    "prompt logprobs": FREE | Sampling(prompt_logprobs=4),
    "prompt logprobs of the tokens": FREE | Sampling(prompt_logprobs=0, logprobs=2),
    "one token, as for echo": FREE | Sampling(prompt_logprobs=20, logprobs=20, max_tokens=1),
}
EACH = pytest.mark.parametrize("sampling", ASKED.values(), ids=list(ASKED))


@pytest.fixture
def engine(house: House) -> Any:
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    return engine


@pytest.fixture
def plain(checkpoints: dict[str, str], plain_answers: PlainAnswers) -> Any:
    """What plain vLLM tells of one prompt."""

    def run(sampling: Sampling, prompt: tuple[int, ...] = PROMPT) -> dict[str, Any]:
        path, dtype = checkpoints[MODEL], MODELS[MODEL][1]
        # With its tokenizer, which tells vLLM the model's end token.
        (answer,) = plain_answers(path, dtype, [prompt], [sampling], skip_tokenizer_init=False)
        return answer

    return run


def told(produced: list[Produced]) -> dict[str, Any]:
    """What the front half would make of it, in the form of plain vLLM's answers."""
    from appliance.engines.vllm.messages import decode_output

    answer: dict[str, Any] = {"logprobs": None, "prompt_logprobs": None, "stop_reason": None}
    for one in produced:
        if one.detail is None:
            continue
        output = decode_output(one.detail)
        assert (output.request_id, output.new_token_ids) == (one.request, [one.token])
        answer["stop_reason"] = output.stop_reason
        if output.new_logprobs is not None:
            ids, values, ranks, _ = output.new_logprobs
            answer["logprobs"] = answer["logprobs"] or []
            answer["logprobs"].append(scores(ids[0], values[0], ranks[0]))
        if output.new_prompt_logprobs_tensors is not None:
            assert answer["prompt_logprobs"] is None, "they are told once"
            ids, values, ranks, *_ = output.new_prompt_logprobs_tensors
            rows = zip(ids, values, ranks, strict=True)
            answer["prompt_logprobs"] = [None, *(scores(*row) for row in rows)]
    answer["finish_reason"] = produced[-1].finished
    answer["sequences"] = [tokens(produced)]
    return answer


def scores(ids: Any, values: Any, rank: Any) -> dict[str, tuple[float, int | None]]:
    """By token, as JSON has it; the first one is the token itself, with its rank."""
    found = dict(zip(map(str, ids.tolist()), values.tolist(), strict=True))
    first = str(ids.tolist()[0])
    return {token: (found[token], int(rank) if token == first else None) for token in found}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["sequences"] == wanted["sequences"]
    assert found["stop_reason"] == wanted["stop_reason"]
    if found["finish_reason"] is not None:
        names = {"repetition": FinishReason.STOP}
        reason = wanted["finish_reason"]
        assert found["finish_reason"] == names.get(reason, reason)
    for kind in ("logprobs", "prompt_logprobs"):
        assert (found[kind] is None) == (wanted[kind] is None), kind
        if found[kind] is None:
            continue
        for mine, plain in zip(found[kind], wanted[kind], strict=True):
            if mine is None:
                assert plain is None
                continue
            assert mine.keys() == plain.keys()
            for token, (value, rank) in mine.items():
                assert value == pytest.approx(plain[token][0], rel=1e-4, abs=1e-4)
                assert rank in (None, plain[token][1])


def finish(engine: Any, name: str, produced: list[Produced]) -> list[Produced]:
    while produced[-1].finished is None:
        produced = produced + engine.step([name], SLABS)
    return produced


@EACH
def test_as_in_plain_vllm(engine: Any, plain: Any, sampling: Sampling) -> None:
    engine.add(sequence(MODEL, "r", PROMPT, sampling))
    produced = finish(engine, "r", engine.prefill("r", SLABS))

    assert_same(told(produced), plain(sampling))


@EACH
def test_as_in_plain_vllm_after_a_swap(
    house: House, engine: Any, plain: Any, sampling: Sampling
) -> None:
    """Between any two tokens, and beside another request."""
    places = house.swap_places(engine, len(PROMPT) + LENGTH)
    engine.add(sequence(MODEL, "other", PROMPT[::-1], GREEDY | Sampling(max_tokens=200)))
    engine.prefill("other", SLABS)
    engine.add(sequence(MODEL, "r", PROMPT, sampling))
    produced = list(engine.prefill("r", SLABS))
    while produced[-1].finished is None:
        house.swap_out(engine, "r", places)
        engine.step(["other"], SLABS)
        engine.swap_in("r", places, SLABS).wait()
        both = engine.step(["other", "r"], SLABS)
        produced += [one for one in both if one.request == "r"]
    engine.forget("other")

    assert_same(told(produced), plain(sampling))


@EACH
def test_as_in_plain_vllm_after_a_loss(twin: House, plain: Any, sampling: Sampling) -> None:
    """What was sent is not told again, and the rest as if nothing had happened."""
    other = twin.engines[MODEL]
    other.begin_load().wait()
    wanted = plain(sampling)
    sent = len(wanted["sequences"][0]) // 2
    output = tuple(wanted["sequences"][0][:sent])

    other.add(sequence(MODEL, "r", PROMPT, sampling, output))
    produced = finish(other, "r", other.prefill("r", SLABS))

    wanted["sequences"][0] = wanted["sequences"][0][sent:]
    wanted["logprobs"] = wanted["logprobs"] and wanted["logprobs"][sent:]
    wanted["prompt_logprobs"] = wanted["prompt_logprobs"] if sent == 0 else None
    assert_same(told(produced), wanted)


@pytest.mark.parametrize("chunk", [33, 2048])
def test_prompt_logprobs_come_in_chunks(engine: Any, plain: Any, chunk: int) -> None:
    """Beside others that decode, and whole although the cache has the prompt already."""
    sampling = FREE | Sampling(prompt_logprobs=3, logprobs=1)
    wanted = plain(sampling, LONG)
    engine.add(sequence(MODEL, "other", PROMPT, GREEDY | Sampling(max_tokens=200)))
    engine.prefill("other", SLABS)
    for name in ("first", "again"):
        engine.add(sequence(MODEL, name, LONG, sampling))
        engine.begin_prefill(name, SLABS)
        produced: list[Produced] = []
        while not produced:
            both = engine.step(["other"], SLABS, (name,), chunk)
            produced = [one for one in both if one.request == name]
        assert_same(told(finish(engine, name, produced)), wanted)
    engine.forget("other")


def test_prompt_logprobs_begin_anew_after_a_failure(
    engine: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step that failed had computed is neither lost nor told twice."""
    sampling = FREE | Sampling(prompt_logprobs=3)
    engine.add(sequence(MODEL, "r", LONG, sampling))
    engine.begin_prefill("r", SLABS)
    assert engine.step((), SLABS, ("r",), 100) == []
    with monkeypatch.context() as patched:
        patched.setattr(engine._core, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step((), SLABS, ("r",), 100)

    produced = finish(engine, "r", engine.prefill("r", SLABS))

    assert_same(told(produced), plain(sampling, LONG))


def test_several_sequences_of_one_prompt(engine: Any, plain: Any) -> None:
    """The front half makes sequences of ``n``, each with a seed of its own."""
    wanted = plain(FREE | Sampling(n=3))
    names = [f"r{number}" for number in range(3)]
    found: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        engine.add(sequence(MODEL, name, PROMPT, FREE | Sampling(seed=FREE["seed"] + number)))
        found[name] = tokens(engine.prefill(name, SLABS))
    for _ in range(LENGTH - 1):
        for one in engine.step(names, SLABS):
            found[one.request].append(one.token)

    assert list(found.values()) == wanted["sequences"]


def test_plain_tokens_have_no_detail(engine: Any) -> None:
    """So that they cost nothing; also where the end token ends the output."""
    ending = Sampling(max_tokens=LENGTH, temperature=0.0, min_tokens=4, logit_bias={2: 90.0})
    for name, sampling in (("greedy", GREEDY), ("ending", ending)):
        engine.add(sequence(MODEL, name, PROMPT[: 31 if name == "ending" else 70], sampling))
        produced = finish(engine, name, engine.prefill(name, SLABS))
        assert all(one.detail is None and one.tokens == 1 for one in produced)


def test_cached_tokens_are_reported_with_the_first(engine: Any) -> None:
    """And only there; another salt has a cache of its own."""
    from appliance.engines.vllm.messages import decode_output

    def first(name: str, salt: str | None) -> Produced:
        engine.add(sequence(MODEL, name, PROMPT, GREEDY, cache_salt=salt))
        (first, *others) = finish(engine, name, engine.prefill(name, SLABS))
        assert all(one.detail is None for one in others)
        return first

    assert first("new", None).detail is None
    detail = first("again", None).detail
    assert detail is not None
    stats = decode_output(detail).prefill_stats
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (70, 64)
    assert first("salted", "salt").detail is None
    assert first("salted again", "salt").detail is not None


def test_prefix_salts_keep_caches_apart(engine: Any) -> None:
    """A sequence finds what others of both its salts left, and nothing else."""

    def cached(name: str, prefix_salt: str, cache_salt: str | None) -> bool:
        spec = sequence(MODEL, name, PROMPT, GREEDY, cache_salt=cache_salt)
        engine.add(msgspec.structs.replace(spec, prefix_salt=prefix_salt))
        (first, *_) = finish(engine, name, engine.prefill(name, SLABS))
        return first.detail is not None

    salts = [("p", None), ("q", None), ("p", "c"), ("q", "c"), ("", "p:c"), ("", "p")]
    assert not any([cached(f"new {number}", *pair) for number, pair in enumerate(salts)])
    assert all([cached(f"again {number}", *pair) for number, pair in enumerate(salts)])


WRONG: dict[str, tuple[Sampling, str]] = {
    "logprobs": (Sampling(logprobs=21), "logprobs"),
    "prompt logprobs": (Sampling(prompt_logprobs=21), "logprobs"),
    "bias": (Sampling(logit_bias={VOCAB: 1.0}), "vocab"),
    "allowed": (Sampling(allowed_token_ids=[VOCAB]), "vocab"),
    "stop": (Sampling(stop_token_ids=[VOCAB]), "vocab"),
    "scored": (Sampling(logprob_token_ids=[VOCAB]), "vocab"),
    "seed": (Sampling(seed=1 << 70), "cannot be|64 bits"),
    "budget": (Sampling(thinking_token_budget=3), "no reasoning parser"),
}


@pytest.mark.parametrize(("sampling", "why"), WRONG.values(), ids=list(WRONG))
def test_what_cannot_be_obeyed_is_refused(engine: Any, sampling: Sampling, why: str) -> None:
    """Before anything is known of the request."""
    with pytest.raises(ValueError, match=why):
        engine.add(sequence(MODEL, "r", PROMPT, sampling))
    assert not engine.knows("r")


def test_an_output_that_is_whole_is_refused(engine: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens 3 leave no room"):
        engine.add(sequence(MODEL, "r", PROMPT, Sampling(max_tokens=3), (5, 6, 7)))


def test_prompt_logprobs_are_bounded(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have to fit into one output."""
    monkeypatch.setattr("appliance.engines.vllm.sampling.MAX_OUTPUT_BYTES", 70 * 6 * 8 - 1)
    with pytest.raises(ValueError, match="prompt_logprobs of 70 tokens"):
        engine.add(sequence(MODEL, "r", PROMPT, Sampling(prompt_logprobs=4)))


def test_all_log_probabilities_are_as_many_as_the_vocabulary(
    checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model allows them: of a token, and of a prompt, which bounds them, too. More than
    there are would end the worker."""
    house = make_house()
    engine = house.build(MODEL, checkpoints[MODEL], max_logprobs=1 << 18)
    engine.begin_load().wait()
    every = Sampling(max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    engine.add(sequence(MODEL, "r", PROMPT, every))

    answer = told(engine.prefill("r", SLABS))

    assert {len(one) for one in answer["logprobs"]} == {VOCAB}
    assert {len(one) for one in answer["prompt_logprobs"][1:]} == {VOCAB}
    for wrong in (Sampling(logprobs=VOCAB + 1), Sampling(prompt_logprobs=VOCAB + 1)):
        with pytest.raises(ValueError, match=f"as the vocabulary has {VOCAB}"):
            engine.add(sequence(MODEL, "r", PROMPT, wrong))
    most = len(PROMPT) * (VOCAB + 2) * 8
    monkeypatch.setattr("appliance.engines.vllm.sampling.MAX_OUTPUT_BYTES", most - 1)
    with pytest.raises(ValueError, match=f"prompt_logprobs of 70 tokens take {most} bytes"):
        engine.add(sequence(MODEL, "r", PROMPT, every))


def test_a_body_that_is_none_is_refused(engine: Any) -> None:
    import msgspec

    for wrong in (b"", b"\xc1", body(GREEDY)[:-3]):
        spec = msgspec.structs.replace(sequence(MODEL, "r", PROMPT, GREEDY), body=wrong)
        with pytest.raises(ValueError, match="request cannot be decoded"):
            engine.add(spec)
