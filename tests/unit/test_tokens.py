"""Tokenizers and chat templates as they are read from checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from appliance.tokens import (
    ChatTemplate,
    ChatTemplateMissing,
    ChatTemplateRefused,
    Tokenizer,
    TokenizerUnusable,
)

from .fake_service import EOS, TEMPLATE, byte_level_encoder, small_tokenizer

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint directory with a tokenizer and no template."""
    byte_level_encoder().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_two_texts_with_marks_between_them(checkpoint: Path) -> None:
    """As the tokenizer of the checkpoint puts them."""
    encoder = byte_level_encoder()
    plain = Tokenizer.load(checkpoint)
    assert plain.encode_pairs("hello")("one") == plain.encode("hello") + plain.encode("one")
    encoder = tokenizers.Tokenizer.from_str(encoder.to_str())
    encoder.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, 0)]
    )
    marked = Tokenizer(encoder)
    pair = marked.encode_pairs("hello")

    for other in ("one", "", "two three"):
        assert pair(other) == (*marked.encode("hello"), *marked.encode(other))
        assert pair(other) == tuple(encoder.encode("hello", other).ids)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 40, 41])
def test_the_beginning_of_a_text_that_fits(most: int) -> None:
    """No more tokens than that, the special ones at the end among them; whole characters."""
    encoder = tokenizers.Tokenizer.from_str(byte_level_encoder().to_str())
    encoder.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, 0)]
    )
    tokenizer, text = Tokenizer(encoder), "héllo wörld, one two €€€ three"
    prompt = tokenizer.encode_beginning(text, most)

    assert len(prompt) <= most
    assert prompt[-1] == 0
    assert text.startswith(tokenizer.decode(prompt))
    if most >= len(tokenizer.encode(text)):
        assert prompt == tokenizer.encode(text)
    elif most > 7:
        assert len(prompt) > most - 5


def configure(checkpoint: Path, **config: object) -> None:
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))


def test_decoding_undoes_encoding() -> None:
    """Any text survives the way to tokens and back."""
    tokenizer = small_tokenizer()
    text = "hello wörld, 日本 🙂"

    assert text == tokenizer.decode(tokenizer.encode(text))
    assert tokenizer.vocab_size == 300


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    """A length limit meant for training does not cut prompts."""
    raw = json.loads(byte_level_encoder().to_str())
    raw["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.load(tmp_path)

    assert small_tokenizer().encode("one two three") == tokenizer.encode("one two three")


def test_a_template_in_the_config_is_used_with_its_special_tokens(checkpoint: Path) -> None:
    """Special tokens written by the template are encoded as such, and not added again."""
    configure(checkpoint, chat_template=TEMPLATE, eos_token={"content": EOS, "lstrip": False})
    tokenizer = Tokenizer.load(checkpoint)

    tokens = tokenizer.render_chat(CHAT)

    assert tokens.count(0) == 1
    assert tokenizer.decode(tokens) == "<|user|>hello<|assistant|>"


def test_the_default_of_several_templates_is_used(checkpoint: Path) -> None:
    """A list of named templates stands for its default one."""
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    configure(checkpoint, chat_template=named)
    tokenizer = Tokenizer.load(checkpoint)

    assert tokenizer.decode(tokenizer.render_chat(CHAT)) == "yes"


def test_a_template_file_goes_before_the_config(checkpoint: Path) -> None:
    """`chat_template.jinja` is the newer place and wins."""
    configure(checkpoint, chat_template="old", bos_token="B")
    (checkpoint / "chat_template.jinja").write_text("new {{ bos_token }}")
    tokenizer = Tokenizer.load(checkpoint)

    assert tokenizer.decode(tokenizer.render_chat(CHAT)) == "new B"


def test_a_checkpoint_without_a_template_cannot_chat(checkpoint: Path) -> None:
    """The error says so, instead of a template being made up."""
    with pytest.raises(ChatTemplateMissing):
        Tokenizer.load(checkpoint).render_chat(CHAT)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "cannot read"),
        ("tokenizer.json", "{}", "unusable"),
        ("tokenizer_config.json", "{", "unusable"),
        ("tokenizer_config.json", '{"bos_token": 3}', "unusable"),
        ("chat_template.jinja", "{% for %}", "does not compile"),
    ],
)
def test_broken_files_are_named(
    checkpoint: Path, file: str, content: str | None, message: str
) -> None:
    """Whatever is wrong with a file, one exception says which."""
    if content is None:
        (checkpoint / file).unlink()
    else:
        (checkpoint / file).write_text(content)

    with pytest.raises(TokenizerUnusable, match=message):
        Tokenizer.load(checkpoint)


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{{ {'a': 'é<'} | tojson }}", '{"a": "é<"}'),
        ("{{ strftime_now('%%') }}", "%"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hello"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
    ],
)
def test_templates_find_what_they_rely_on(source: str, rendered: str) -> None:
    """Loop controls, unescaped JSON, dates, trimmed blocks and generation marks all work."""
    assert rendered == ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing.there }}",
    ],
)
def test_a_template_that_fails_is_a_refusal(source: str) -> None:
    """What a template raises, or is not allowed to do, refuses the messages."""
    with pytest.raises(ChatTemplateRefused):
        ChatTemplate(source, {}).render(CHAT)


def test_a_piece_shows_half_characters_as_bytes() -> None:
    """The pieces of a text join to its bytes, also where a character is cut in two."""
    tokenizer = small_tokenizer()
    pieces = [tokenizer.piece(token) for token in tokenizer.encode("a 日本🙂")]

    assert "a 日本🙂".encode() == b"".join(raw for _, raw in pieces)
    assert tokenizer.piece(0) == (EOS, EOS.encode())
