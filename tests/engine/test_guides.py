"""What a guide asks for is what comes out, whatever happens to the request on its way."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema  # type: ignore[import-untyped]
import pytest
from tokenizers import Tokenizer

from appliance.engines.protocol import GuideRefused, SequenceSpec
from appliance.engines.vllm import guide_budget
from appliance.vocabulary import FinishReason
from tests.engine.house import EOS, House, Sampling, body, sequence, tokens
from tests.hostile.guides import AMBIGUOUS

MODEL = "qwen2-gqa"
PROMPT = tuple(range(10, 80))
SLABS = 40
WORDS = ["yes", "no", "maybe"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "ages"],
    "additionalProperties": False,
}
ONLY_GUIDANCE = {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500}
"""xgrammar ignores ``multipleOf``, so vLLM has another backend for it."""


class Guide(NamedTuple):
    """One of vLLM's ``structured_outputs``, with its name there."""

    kind: str
    text: Any = True


JSON = Guide("json", json.dumps(SCHEMA))
DIVISIBLE = Guide("json", json.dumps(ONLY_GUIDANCE))
PLAIN = Guide(
    "json",
    json.dumps({"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 4, "maxItems": 9}),
)
"""One that xgrammar compiles."""


def guided(guide: Guide, seed: int = 3) -> Sampling:
    return Sampling(
        max_tokens=800, temperature=1.0, seed=seed, structured_outputs={guide.kind: guide.text}
    )


@pytest.fixture(scope="module")
def tokenizer(checkpoints: dict[str, str]) -> Tokenizer:
    return Tokenizer.from_file(str(Path(checkpoints[MODEL], "tokenizer.json")))


def text(tokenizer: Tokenizer, output: Sequence[int]) -> str:
    """What the tokens spell; the last one says stop."""
    assert output[-1] == EOS
    said: str = tokenizer.decode(list(output[:-1]))
    return said


def finish(engine: Any, name: str) -> list[int]:
    """All further tokens of a request, which ends by itself."""
    output: list[int] = []
    while True:
        (one,) = engine.step([name], SLABS)
        output.append(one.token)
        if one.finished:
            assert one.finished is FinishReason.STOP
            return output


def whole(engine: Any, guide: Guide, seed: int = 3) -> list[int]:
    engine.add(sequence(MODEL, "whole", PROMPT, guided(guide, seed)))
    return tokens(engine.prefill("whole", SLABS)) + finish(engine, "whole")


def check(guide: Guide, answer: str) -> None:
    """The text is what the guide allows."""
    match guide.kind:
        case "json":
            jsonschema.validate(json.loads(answer), json.loads(guide.text))
        case "json_object":
            assert isinstance(json.loads(answer), dict)
        case "regex":
            assert re.fullmatch(guide.text, answer)
        case "choice":
            assert answer in WORDS
        case "grammar":
            assert re.fullmatch("(ab)+", answer)
        case "structural_tag":
            assert answer == "<a>true</a>" or answer == "<a>false</a>"


TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
        "end": "</a>",
    },
}
GUIDES = {
    "schema": JSON,
    "plain": PLAIN,
    "guidance": DIVISIBLE,
    "object": Guide("json_object"),
    "regex": Guide("regex", "[a-f]{3}-[0-9]{2,4}"),
    "choice": Guide("choice", WORDS),
    "ebnf": Guide("grammar", 'root ::= "ab" | "ab" root'),
    "tag": Guide("structural_tag", json.dumps(TAG)),
}
EACH = pytest.mark.parametrize("guide", GUIDES.values(), ids=list(GUIDES))


@EACH
@pytest.mark.parametrize("seed", [1, 2])
def test_the_output_follows_its_guide(
    house: House, tokenizer: Tokenizer, guide: Guide, seed: int
) -> None:
    """A model that would say anything says what it is asked for, and stops."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    engine.prepare(body(guided(guide)))

    check(guide, text(tokenizer, whole(engine, guide, seed)))


@EACH
def test_a_guided_request_is_swapped_out_and_in(house: House, guide: Guide) -> None:
    """It goes on as if it had stayed; and so does a guide in the midst of a batch."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    expected = whole(engine, guide)
    places = house.swap_places(engine, len(PROMPT) + len(expected))

    engine.add(sequence(MODEL, "r", PROMPT, guided(guide)))
    output = tokens(engine.prefill("r", SLABS))
    while len(output) < min(4, len(expected) - 1):
        output += tokens(engine.step(["r"], SLABS))
        house.swap_out(engine, "r", places)
        engine.swap_in("r", places, SLABS).wait()
    output += finish(engine, "r")

    assert output == expected


@EACH
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_guided_request_is_recovered(
    house: House, twin: House, guide: Guide, share: float
) -> None:
    """After a lost worker it goes on elsewhere, behind the tokens that were sent."""
    lost, other = house.engines[MODEL], twin.engines[MODEL]
    lost.begin_load().wait()
    other.begin_load().wait()
    expected = whole(lost, guide)
    sent = 1 + int(share * (len(expected) - 2))

    other.add(sequence(MODEL, "r", PROMPT, guided(guide), tuple(expected[:sent])))
    output = tokens(other.prefill("r", SLABS))
    if other.knows("r"):
        output += finish(other, "r")

    assert expected[:sent] + output == expected


def test_a_batch_of_all_kinds(house: House, tokenizer: Tokenizer) -> None:
    """Every request follows its own guide, of whatever backend, beside others that have none; their
    prompts are computed in chunks beside the decoding."""
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    free = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
    specs = {name: sequence(MODEL, name, PROMPT, guided(g)) for name, g in GUIDES.items()}
    specs["free"] = sequence(MODEL, "free", PROMPT[::-1], free)
    outputs = _serve(engine, list(specs.values()), chunk_tokens=48)

    for name, guide in GUIDES.items():
        check(guide, text(tokenizer, outputs[name]))
    engine.add(sequence(MODEL, "alone", PROMPT[::-1], free))
    alone = tokens(engine.prefill("alone", SLABS))
    while len(alone) < 40:
        alone += tokens(engine.step(["alone"], SLABS))
    assert outputs["free"] == alone


def _serve(engine: Any, specs: Sequence[SequenceSpec], chunk_tokens: int) -> dict[str, list[int]]:
    """Serve all of them, each beginning while those before decode."""
    outputs: dict[str, list[int]] = {}
    waiting = list(specs)
    decoding: list[str] = []
    begun: list[str] = []
    while waiting or decoding or begun:
        if waiting and not begun:
            spec = waiting.pop(0)
            engine.add(spec)
            engine.begin_prefill(spec.request, SLABS)
            begun.append(spec.request)
        produced = engine.step(list(decoding), SLABS, tuple(begun), chunk_tokens)
        for one in produced:
            outputs.setdefault(one.request, []).append(one.token)
            if one.request in begun:
                begun.remove(one.request)
                decoding.append(one.request)
            if one.finished:
                decoding.remove(one.request)
    return outputs


IMPOSSIBLE = {
    "no schema": Guide("json", '{"type": "nothing"}'),
    "no json": Guide("json", '{"type": '),
    "too deep": Guide("json", '{"not": ' * 900 + "{}" + "}" * 900),
    "no regex": Guide("regex", "(a"),
    "no grammar": Guide("grammar", "root ::= nowhere"),
    "empty": Guide("grammar", " "),
    "no choice": Guide("choice", []),
    "no tag": Guide("structural_tag", '{"type": "structural_tag"}'),
}


@pytest.mark.parametrize("guide", IMPOSSIBLE.values(), ids=list(IMPOSSIBLE))
def test_an_impossible_guide_is_refused(house: House, guide: Guide) -> None:
    """With a reason, and nothing is left of its request; the engine goes on."""
    engine = house.engines[MODEL]
    with pytest.raises(GuideRefused, match=r"\w"):
        engine.prepare(body(guided(guide)))
    with pytest.raises(GuideRefused, match=r"\w"):
        engine.add(sequence(MODEL, "r", PROMPT, guided(guide)))
    assert not engine.knows("r")


def test_an_output_that_does_not_follow_is_refused(house: House) -> None:
    """Tokens that the guide does not allow cannot be gone on from."""
    engine = house.engines[MODEL]
    with pytest.raises(GuideRefused, match="so far"):
        engine.add(sequence(MODEL, "r", PROMPT, guided(JSON), (7, 7)))


def test_a_guide_that_takes_too_long_ends_its_request(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the guide's fault; others in the same steps go on."""
    monkeypatch.setattr(guide_budget, "AT_ONCE_SECONDS", 0.1)
    engine = house.engines[MODEL]
    engine.begin_load().wait()
    slow = Guide("grammar", AMBIGUOUS)
    sampling = Sampling(
        max_tokens=800,
        min_tokens=700,
        temperature=1.0,
        seed=3,
        structured_outputs={slow.kind: slow.text},
    )
    engine.add(sequence(MODEL, "slow", PROMPT, sampling))
    engine.add(sequence(MODEL, "fine", PROMPT, guided(Guide("regex", "(ab){300}"))))
    for name in ("slow", "fine"):
        engine.prefill(name, SLABS)

    reason, steps = None, 0
    while reason is None:
        steps += 1
        for one in engine.step(["slow", "fine"], SLABS):
            assert one.finished is None or one.request == "slow"
            reason = reason or one.finished
    assert reason is FinishReason.INVALID_GUIDE
    assert 10 < steps < 700
    assert not engine.knows("slow")
    engine.step(["fine"], SLABS)
    engine.forget("fine")
