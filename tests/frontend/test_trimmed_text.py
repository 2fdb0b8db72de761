"""What is cut off a text is cut off before it is made tokens, and the tokens are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from vllm.exceptions import VLLMValidationError
from vllm.renderers.params import TokenizeParams

from appliance.frontend.counts import most_characters
from appliance.frontend.serving.trimmed_text import trim_before_tokens
from appliance.service.front_frames import FrontModel, Submit
from tests.frontend.stand_in_core import StandInCore
from tests.patience import PATIENCE_SECONDS

WORDS = "one two three four five six seven " * 10_000


MOST = most_characters(0)


class Sided:
    """A tokenizer as far as it is asked before a text is encoded."""

    max_chars_per_token = 4

    def __init__(self, truncation_side: str) -> None:
        self.truncation_side = truncation_side


@pytest.fixture
def _trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_text_len_check", "_get_text_truncation_offset"):
        monkeypatch.setattr(TokenizeParams, name, getattr(TokenizeParams, name))
    trim_before_tokens()


@pytest.mark.usefixtures("_trimmed")
@pytest.mark.parametrize("kept", [1, -1])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_is_cut_on_its_side(side: Any, named: bool, kept: int) -> None:
    """On the one that is named, or else the tokenizer's."""
    tokenizer: Any = Sided("right" if named else side)
    params = TokenizeParams(
        max_total_tokens=100,
        truncate_prompt_tokens=kept,
        truncation_side=side if named else None,
    )
    text = "a" * 10 + "b" * (MOST - 10) + "c" * 10

    cut = params._text_len_check(tokenizer, text)

    assert cut == (text[10:] if side == "left" else text[:-10])
    assert params._get_text_truncation_offset(tokenizer, text) == (10 if side == "left" else 0)


@pytest.mark.usefixtures("_trimmed")
def test_more_is_kept_of_a_text_of_which_more_tokens_are() -> None:
    tokenizer: Any = Sided("right")
    params = TokenizeParams(max_total_tokens=1 << 20, truncate_prompt_tokens=1 << 15)
    assert len(params._text_len_check(tokenizer, "a" * (1 << 20))) == 16 << 15


@pytest.mark.usefixtures("_trimmed")
def test_what_is_not_truncated_is_refused_if_it_is_too_long() -> None:
    tokenizer: Any = Sided("right")
    params = TokenizeParams(max_total_tokens=2)
    with pytest.raises(VLLMValidationError, match="more than 8 characters"):
        params._text_len_check(tokenizer, "abcdefghij")
    assert params._text_len_check(tokenizer, "abc") == "abc"
    assert params._get_text_truncation_offset(tokenizer, "abc") == 0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tokens(models: tuple[FrontModel, ...]) -> PreTrainedTokenizerBase:
    (path,) = {model.path for model in models if model.name == "talker"}
    return AutoTokenizer.from_pretrained(Path(path))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("most", [1, 7, 100, -1])
async def test_the_tokens_are_those_of_the_whole_text(
    core: StandInCore, tokens: PreTrainedTokenizerBase, most: int
) -> None:
    asked = {"model": "talker", "prompt": WORDS, "max_tokens": 1, "truncate_prompt_tokens": most}

    async with httpx.AsyncClient(base_url=core.url, timeout=PATIENCE_SECONDS) as client:
        answer = await client.post("/v1/completions", json=asked)

    assert answer.status_code == 200, answer.text
    whole, prompt = tokens.encode(WORDS), list((await core.seen(Submit)).prompt)
    assert len(prompt) == most or most == -1
    assert prompt == [*whole[:1], *whole[len(whole) - len(prompt) + 1 :]]
