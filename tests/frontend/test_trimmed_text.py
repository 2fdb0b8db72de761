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

from appliance.frontend.serving.trimmed_text import trim_before_tokens
from appliance.service.front_frames import FrontModel, Submit
from tests.frontend.stand_in_core import StandInCore

WORDS = "one two three four five six seven " * 400


class Counting:
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
@pytest.mark.parametrize(("side", "kept"), [("right", "abcdefgh"), ("left", "stuvwxyz")])
def test_the_tokenizers_side_is_cut(side: str, kept: str) -> None:
    tokenizer: Any = Counting(side)
    params = TokenizeParams(max_total_tokens=2, truncate_prompt_tokens=1)
    text = "abcdefghijklmnopqrstuvwxyz"

    assert params._text_len_check(tokenizer, text) == kept
    cut = params._get_text_truncation_offset(tokenizer, text)
    assert cut == (len(text) - len(kept) if side == "left" else 0)


@pytest.mark.usefixtures("_trimmed")
def test_a_side_that_is_named_is_the_one() -> None:
    tokenizer: Any = Counting("left")
    params = TokenizeParams(max_total_tokens=2, truncate_prompt_tokens=1, truncation_side="right")
    assert params._text_len_check(tokenizer, "abcdefghij") == "abcdefgh"


@pytest.mark.usefixtures("_trimmed")
def test_what_is_not_truncated_is_refused_if_it_is_too_long() -> None:
    tokenizer: Any = Counting("right")
    with pytest.raises(VLLMValidationError, match="more than 8 characters"):
        TokenizeParams(max_total_tokens=2)._text_len_check(tokenizer, "abcdefghij")


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

    async with httpx.AsyncClient(base_url=core.url, timeout=60) as client:
        answer = await client.post("/v1/completions", json=asked)

    assert answer.status_code == 200, answer.text
    whole, prompt = tokens.encode(WORDS), list((await core.seen(Submit)).prompt)
    assert len(prompt) == most or most == -1
    assert prompt == [*whole[:1], *whole[len(whole) - len(prompt) + 1 :]]
