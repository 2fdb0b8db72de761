"""A checkpoint that says what it was made to say: of its script, every token has one successor.

It is a real Llama whose attention and MLPs add nothing, so that the last token alone decides; its
head points from each token of the script to the next one. What reads a model's text (parsers,
clients) can be tried so with a text that is known, through everything that is between.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer

THOUGHT: Final = "Which city? Rome, then"
ANSWER: Final = "It is sunny."
CALL: Final = ('{"name": "book", ', '"arguments": {"city":', ' "Rome", "nights":', " 2}}")
"""Pieces, each a token, of the call that it writes when it is asked with tools."""
CITY, NIGHTS = "Rome", 2
MORE: Final = ('{"name": "book",', ' "arguments": {"city":', ' "Bonn", "nights":', " 3}}")
"""Those of a second call, which are other tokens."""

_MARKS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|tools|>")
_BETWEEN: Final = "</tool_call>\n<tool_call>"
_SCRIPTS: Final = (
    ("<|assistant|>", "<think>", THOUGHT, "</think>", ANSWER, "<|eos|>"),
    ("<|tools|>", "<tool_call>", *CALL, "</tool_call>", "<|eos|>"),
)
_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|system|>' if message.role == 'system' else '<|user|>' }}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{{ eos_token }}"
    "{% endfor %}"
    "{% if tools and messages[-1].role == 'user' %}{{ '<think></think><|tools|>' }}"
    "{% else %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
    "{% endif %}"
)
_CERTAINTY: Final = 4.0
"""How far a successor's logit is above those of others, over the noise between embeddings."""


def make_parrot(source: Path, path: Path, *, calls_twice: bool = False) -> None:
    """Make it at `path` of a demo checkpoint of the Llama family; asked with tools, it calls once,
    or twice in one answer.

    Raises `ValueError` if a token of the script would have two successors.
    """
    shutil.copytree(source, path)
    said, called = _SCRIPTS
    scripts = (said, (*called[:-2], _BETWEEN, *MORE, *called[-2:]) if calls_twice else called)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    marks = (*_MARKS, *CALL, *((_BETWEEN, *MORE) if calls_twice else ()))
    added = [AddedToken(mark, special=False, normalized=False) for mark in marks]
    tokenizer.add_tokens(added)
    tokenizer.save(str(path / "tokenizer.json"))
    _edit(path / "tokenizer_config.json", chat_template=_TEMPLATE)
    _edit(path / "config.json", vocab_size=tokenizer.get_vocab_size())
    successors: dict[int, int] = {}
    for script in scripts:
        tokens = [id_ for text in script for id_ in _encoded(tokenizer, text)]
        for token, following in pairwise(tokens):
            if successors.setdefault(token, following) != following:
                raise ValueError(f"{tokenizer.id_to_token(token)!r} is in the script twice")
    _write_weights(path / "model.safetensors", tokenizer.get_vocab_size(), successors)


def _encoded(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _edit(path: Path, **fields: object) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(document | fields), encoding="utf-8")


def _write_weights(path: Path, vocabulary: int, successors: dict[int, int]) -> None:
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensor)
    known = tensors["model.embed_tokens.weight"]
    dice = np.random.Generator(np.random.PCG64(0))
    more = dice.standard_normal((vocabulary - len(known), known.shape[1]), dtype=np.float32)
    embedding = np.concatenate([known, more])
    head = np.zeros_like(embedding)
    for token, following in successors.items():
        direction = embedding[token] / np.linalg.norm(embedding[token])
        head[following] += _CERTAINTY * direction
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(tensors, path, metadata={"format": "pt"})
