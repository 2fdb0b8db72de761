"""A text that is truncated is cut before it is made tokens, whichever side is cut.

vLLM cuts off characters that cannot be among the tokens that are kept, but only if the request
names the side (`truncation_side`). Without it, 8 MiB of which ten tokens are kept took 30 s, and
other streams waited up to 2 s at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from vllm.renderers.params import TokenizeParams
from vllm.tokenizers import TokenizerLike

T = TypeVar("T")
_Check = Callable[[TokenizeParams, TokenizerLike | None, str], T]


def trim_before_tokens() -> None:
    """Have requests that name no side cut on the tokenizer's from now on. Once."""
    TokenizeParams._text_len_check = _on_a_side(TokenizeParams._text_len_check)
    TokenizeParams._get_text_truncation_offset = _on_a_side(
        TokenizeParams._get_text_truncation_offset
    )


def _on_a_side(check: _Check[T]) -> _Check[T]:
    def checked(params: TokenizeParams, tokenizer: TokenizerLike | None, text: str) -> T:
        cuts = params.truncate_prompt_tokens is not None and params.truncation_side is None
        if cuts and tokenizer is not None:
            params = replace(params, truncation_side=tokenizer.truncation_side)
        return check(params, tokenizer, text)

    return checked
