"""`appliance show` over a fake service and over a real checkpoint's description."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from appliance.api.app import create_app
from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.service.interface import ModelActivity, ModelFacts, ModelNotFound, ModelTerms
from appliance.vocabulary import Slo
from tests.unit.doubles.fake_service import FakeService
from tests.unit.doubles.serving import Call, commanded

MODEL = ModelActivity(
    model="org/small",
    state="loaded",
    residency={"0": "loaded", "1": "cold"},
    running=2,
    waiting=1,
    draining=True,
    terms=ModelTerms(
        slo=Slo(ttft_seconds=5.0, tbt_seconds=0.1),
        batch_slo=Slo(ttft_seconds=60.0, tbt_seconds=2.0),
        max_queue=7,
        pinned=True,
    ),
    facts=ModelFacts(
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        parameters=8_030_000_000,
        weight_bytes=16 << 30,
        kv_bytes_per_token=128 << 10,
        max_context_tokens=8192,
        max_batch=32,
        path="/srv/models/small",
    ),
)


class OneModel(FakeService):
    """Knows what `MODEL` does now."""

    model = MODEL

    def model_activity(self, name: str) -> ModelActivity:
        if name != MODEL.model:
            raise ModelNotFound(name)
        return self.model


@pytest.fixture
async def call() -> AsyncIterator[Call]:
    async with commanded(create_app(OneModel()), "show") as call:
        yield call


async def test_a_model_is_shown(call: Call) -> None:
    """Line by line, sizes as people read them."""
    shown = await call("org/small")

    assert (shown.exit_code, shown.stdout.splitlines()) == (
        0,
        [
            "architecture  LlamaForCausalLM",
            "parameters    8.0B",
            "context       8192 tokens",
            "computed in   bfloat16",
            "weights       16GiB",
            "KV per token  128KiB",
            "batch         at most 32 requests",
            "files         /srv/models/small",
            "interactive   first token 5 s, then 0.1 s each",
            "batch work    first token 60 s, then 2 s each",
            "queue         at most 7 requests",
            "pin           stays in the host cache",
            "state         loaded",
            "residency     instance 0: loaded, instance 1: cold",
            "requests      2 running, 1 waiting; takes no new ones",
        ],
    )


async def test_groups_that_can_have_it_are_shown(
    monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """Where the configuration has groups."""
    grouped = msgspec.structs.replace(MODEL, groups=("pair", "other"))
    monkeypatch.setattr(OneModel, "model", grouped)

    assert "groups        pair, other" in (await call("org/small")).stdout.splitlines()


@pytest.mark.parametrize(
    ("names", "places", "rank", "line"),
    [
        (("m:a",), 1, 0, "m:a (a fixed list)"),
        (("m:a", "m:b"), 4, 16, "m:a, m:b (2 of 4 places, for ranks up to 16)"),
        ((), 4, 16, "none (0 of 4 places, for ranks up to 16)"),
    ],
)
async def test_adapters_are_shown(
    monkeypatch: pytest.MonkeyPatch,
    call: Call,
    names: tuple[str, ...],
    places: int,
    rank: int,
    line: str,
) -> None:
    facts = msgspec.structs.replace(
        MODEL.facts, adapters=names, max_loras=places, max_lora_rank=rank
    )
    monkeypatch.setattr(OneModel, "model", msgspec.structs.replace(MODEL, facts=facts))

    shown = await call("org/small")

    assert f"adapters      {line}" in shown.stdout.splitlines()


async def test_parsers_are_shown_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """One that was chosen, one that the configuration names, and why there is none."""
    facts = msgspec.structs.replace(
        MODEL.facts,
        tool_parser="hermes",
        tool_parser_reason="model type qwen3, and <tool_call> in the chat template",
        reasoning_parser_reason="there is no chat template",
    )
    monkeypatch.setattr(OneModel, "model", msgspec.structs.replace(MODEL, facts=facts))

    lines = (await call("org/small")).stdout.splitlines()

    assert "tool parser   hermes (model type qwen3, and <tool_call> in the chat template)" in lines
    assert "reasoning     none (there is no chat template)" in lines


@pytest.mark.parametrize(
    ("architecture", "line"),
    [
        ("Mamba2ForCausalLM", "states        29MiB of each request"),
        ("WhisperForConditionalGeneration", "KV of sound   29MiB of each request"),
    ],
)
async def test_what_a_request_keeps_however_long_it_is_is_shown(
    monkeypatch: pytest.MonkeyPatch, call: Call, architecture: str, line: str
) -> None:
    facts = msgspec.structs.replace(MODEL.facts, architecture=architecture, state_bytes=29 << 20)
    monkeypatch.setattr(OneModel, "model", msgspec.structs.replace(MODEL, facts=facts))

    assert line in (await call("org/small")).stdout.splitlines()


@pytest.mark.parametrize(
    ("architecture", "images", "reads"),
    [
        ("Gemma3ForConditionalGeneration", 0, "text only, no images"),
        ("Gemma3ForConditionalGeneration", 1, "text, and up to 1 image in a prompt"),
        ("Gemma3ForConditionalGeneration", 4, "text, and up to 4 images in a prompt"),
        ("Qwen2AudioForConditionalGeneration", 0, "text only, no sounds"),
        ("Phi4MMForCausalLM", 0, "text only, no images or sound"),
    ],
)
async def test_what_is_read_is_shown(
    monkeypatch: pytest.MonkeyPatch, call: Call, architecture: str, images: int, reads: str
) -> None:
    """Of a model that can read more than text."""
    facts = msgspec.structs.replace(MODEL.facts, architecture=architecture, images=images)
    monkeypatch.setattr(OneModel, "model", msgspec.structs.replace(MODEL, facts=facts))

    shown = await call("org/small")

    assert shown.stdout.splitlines()[:2] == [
        f"architecture  {architecture}",
        f"reads         {reads}",
    ]


async def test_weights_that_are_stored_in_less_are_shown(
    monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """The memory is that of the type in which they are computed."""
    facts = msgspec.structs.replace(MODEL.facts, multiplied="mxfp4")
    monkeypatch.setattr(OneModel, "model", msgspec.structs.replace(MODEL, facts=facts))

    shown = await call("org/small")

    assert "weights       16GiB, in bfloat16; its files have them in mxfp4" in shown.stdout


async def test_a_program_gets_all_of_it(call: Call) -> None:
    """What the endpoint answers, as it is."""
    shown = await call("org/small", "--json")

    assert msgspec.convert(json.loads(shown.stdout), ModelActivity) == MODEL


async def test_a_model_that_there_is_not(call: Call) -> None:
    """Is status 1."""
    missing = await call("nobody")

    assert (missing.exit_code, missing.stderr) == (1, "error: model 'nobody' does not exist\n")


def test_parameters_are_counted(fake_checkpoint: Callable[..., Path]) -> None:
    """From the headers, whatever they are computed in."""
    entry = read_checkpoint("tiny", fake_checkpoint(tie_word_embeddings=True))

    assert entry.parameters == 512 * 512
