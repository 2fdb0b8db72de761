"""A text that is truncated is cut before it is made tokens, whichever side is cut.

vLLM cuts it only if the request names the side (`truncation_side`), and to what a whole context
might have if each token were the longest one. So 8 MiB of which ten tokens are kept took 30 s, and
other streams waited up to 2 s at a time. Here it is cut to 16 characters for each token that is
kept, and to 262144 at least: tokens are shorter than that, except in texts of blanks.
"""

from __future__ import annotations

from vllm.renderers.params import TokenizeParams
from vllm.tokenizers import TokenizerLike

from appliance.frontend.counts import most_characters

_text_len_check = TokenizeParams._text_len_check
_get_text_truncation_offset = TokenizeParams._get_text_truncation_offset


def trim_before_tokens() -> None:
    """Have texts that are truncated be cut from now on."""
    TokenizeParams._text_len_check = _cut
    TokenizeParams._get_text_truncation_offset = _cut_off


def _cut(params: TokenizeParams, tokenizer: TokenizerLike | None, text: str) -> str:
    most = _most(params)
    if most is None or tokenizer is None or len(text) <= most:
        return str(_text_len_check(params, tokenizer, text))
    return text[-most:] if _side(params, tokenizer) == "left" else text[:most]


def _cut_off(params: TokenizeParams, tokenizer: TokenizerLike | None, text: str) -> int:
    """How many characters are cut off the beginning."""
    most = _most(params)
    if most is None or tokenizer is None:
        return int(_get_text_truncation_offset(params, tokenizer, text))
    return max(len(text) - most, 0) if _side(params, tokenizer) == "left" else 0


def _most(params: TokenizeParams) -> int | None:
    """Characters of a text that is truncated; None if it is not."""
    kept = params.truncate_prompt_tokens
    if kept is None or params.max_input_tokens is None:
        return None
    return most_characters(params.max_input_tokens if kept < 0 else kept)


def _side(params: TokenizeParams, tokenizer: TokenizerLike) -> str:
    return str(params.truncation_side or tokenizer.truncation_side)
