"""Text to tokens and back: a model's tokenizer, its chat template, and text as tokens stream in.

Reads what a checkpoint directory holds (`tokenizer.json`, `tokenizer_config.json`,
`chat_template.jinja`) and needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.nodes
import jinja2.parser
import msgspec
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TokenizerError(Exception):
    """Something about a tokenizer or its chat template."""


class TokenizerUnusable(TokenizerError):
    """The checkpoint's tokenizer files are missing or broken."""


class ChatTemplateMissing(TokenizerError):
    """The checkpoint has no chat template; only plain completions are possible."""


class ChatTemplateRefused(TokenizerError):
    """The chat template would not render these messages; the text says why."""


class Tokenizer:
    """Encodes and decodes for one model. Immutable; `encode` may be called from any thread."""

    def __init__(self, encoder: tokenizers.Tokenizer, template: ChatTemplate | None = None) -> None:
        encoder.no_truncation()  # a length meant for training must not cut prompts
        encoder.no_padding()
        self._encoder = encoder
        self._template = template
        self._added = encoder.get_added_tokens_decoder()
        self._bytes_of = _byte_alphabet() if _is_byte_level(encoder) else None
        self._pieces: dict[int, tuple[str, bytes]] = {}
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size: int = encoder.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer of the checkpoint directory `path`. Raises `TokenizerUnusable`."""
        try:
            raw = (path / "tokenizer.json").read_bytes()
        except OSError as error:
            raise TokenizerUnusable(f"cannot read {path / 'tokenizer.json'}: {error}") from error
        try:
            encoder = tokenizers.Tokenizer.from_buffer(raw)
        except Exception as error:  # the library raises bare Exception for a file it cannot use
            raise TokenizerUnusable(f"{path / 'tokenizer.json'} is unusable: {error}") from error
        return cls(encoder, _load_template(path))

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`, with the special tokens the model expects around it if asked."""
        return tuple(self._encoder.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_pairs(self, first: str) -> Callable[[str], tuple[int, ...]]:
        """What makes token ids of `first` and of another text, with the special tokens that the
        model expects between them. `first` is encoded once."""
        known = self._encoder.encode(first, add_special_tokens=False)

        def pair(second: str) -> tuple[int, ...]:
            other = self._encoder.encode(second, add_special_tokens=False)
            return tuple(self._encoder.post_process(known, other).ids)

        return pair

    def encode_beginning(self, text: str, most: int) -> tuple[int, ...]:
        """As `encode`, of no more of `text` from its beginning than makes `most` tokens, the
        special ones included; `most` has room for those."""
        room = max(0, most - self._encoder.num_special_tokens_to_add(False))
        while True:
            plain = self._encoder.encode(text, add_special_tokens=False)
            if len(plain.ids) <= room or not text:
                return self.encode(text)
            # Less text may make other tokens, and then more than were left of it.
            end = plain.offsets[room - 1][1] if room else 0
            text = text[: min(end, plain.offsets[room][0], len(text) - 1)]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's answer begins, if asked for.

        Messages and tools are as OpenAI has them, but arguments of tool calls are objects.
        `variables` are further ones for the template, such as ``enable_thinking``.
        Raises `ChatTemplateMissing` and `ChatTemplateRefused`.
        """
        if self._template is None:
            raise ChatTemplateMissing("the model has no chat template")
        text = self._template.render(
            messages, tools, add_generation_prompt=add_generation_prompt, variables=variables
        )
        # The template writes its special tokens out; adding them again would double them.
        return self.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of `tokens`, special ones left out unless asked for, bytes that are no UTF-8 as
        U+FFFD."""
        return self._encoder.decode(tokens, skip_special_tokens=not special_tokens)

    def written(self, tokens: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it; empty for one that it has not."""
        return [self._encoder.id_to_token(token) or "" for token in tokens]

    def piece(self, token: int) -> tuple[str, bytes]:
        """One token alone: its text (special tokens too) and its bytes, which may be half a
        character."""
        known = self._pieces.get(token)
        if known is None:
            text = self._encoder.decode([token], skip_special_tokens=False)
            known = self._pieces[token] = (text, self._raw_bytes(token, text))
        return known

    def _raw_bytes(self, token: int, text: str) -> bytes:
        written = self._encoder.id_to_token(token)
        if self._bytes_of is None or token in self._added or written is None:
            return text.encode()
        return bytes(self._bytes_of[character] for character in written)


class ChatTemplate:
    """A checkpoint's Jinja template, sandboxed, with the names that templates rely on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises `TokenizerUnusable` when `source` is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerUnusable(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text, with the generation prompt if asked for. What the template is
        told anyway cannot be among the `variables`.

        Raises `ChatTemplateRefused`.
        """
        try:
            return self._template.render(
                **dict(variables or {})
                | {
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
                | self._special_tokens
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ChatTemplateRefused(f"the chat template refused: {error}") from error


class TextStream:
    """The text of one sequence while its tokens come, cut before the first stop string.

    Text that might change with the next token (half a character) or turn out to be the beginning
    of a stop string is held back. The first `min_tokens` tokens cannot complete a stop string.
    `prompt` is what came before: some tokenizers spell a word otherwise at the start of a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
        special_tokens: bool = False,
    ) -> None:
        """With `special_tokens`, the text holds those, too."""
        self._decoder = _IncrementalDecoder(tokenizer, prompt, special_tokens)
        self._cutter = _StopCutter(stops) if stops else None
        self._exempt_tokens = min_tokens

    @property
    def stopped(self) -> bool:
        """A stop string came; nothing more will be given out."""
        return self._cutter is not None and self._cutter.stopped

    @property
    def stop(self) -> str | None:
        """The stop string that came."""
        return None if self._cutter is None else self._cutter.found

    def push(self, token: int) -> str:
        """Text that is certain now that `token` came; often one word, sometimes none."""
        text = self._decoder.push(token)
        if self._cutter is None:
            return text
        self._exempt_tokens -= 1
        return self._cutter.push(text, exempt=self._exempt_tokens >= 0)

    def finish(self) -> str:
        """What was held back, once no token follows."""
        text = self._decoder.finish()
        if self._cutter is None:
            return text
        return self._cutter.push(text, exempt=False) + self._cutter.finish()


_REPLACEMENT: Final = "�"
_HELD_REPLACEMENTS: Final = 3
"""A character has at most four bytes, so at most three may wait for the last one."""
_TRIM_TOKENS: Final = 16
_GARBAGE_TOKENS: Final = 256
"""A run of this many tokens that never ends on a whole character is garbage: given out as it is,
so that decoding stays cheap."""
_PROMPT_TOKENS: Final = 16


class _IncrementalDecoder:
    """Decodes a window of the latest tokens and gives out what is new and cannot change.

    The window starts where a character starts and keeps at least one token already given out:
    decoders that treat the start of a text specially then do so with that token, not a new one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], special_tokens: bool) -> None:
        self._decode = partial(tokenizer.decode, special_tokens=special_tokens)
        self._unseen = frozenset[int]() if special_tokens else tokenizer.special_ids
        self._window = [t for t in prompt[-_PROMPT_TOKENS:] if t not in self._unseen]
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            self._window, text = [], ""
        self._shown = len(text)
        """Characters of the window's text that were given out."""
        self._chunk = 0
        """Where in the window the last chunk that ended on a whole character starts."""
        self._chunk_end = len(self._window)

    def push(self, token: int) -> str:
        if token in self._unseen:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        garbage = len(self._window) - self._chunk_end >= _GARBAGE_TOKENS
        sure = len(text) if garbage else _sure_length(text)
        delta = text[self._shown : sure]
        self._shown = max(self._shown, sure)
        if delta and sure == len(text):
            self._chunk, self._chunk_end = self._chunk_end, len(self._window)
            if len(self._window) > _TRIM_TOKENS:
                self._trim()
        return delta

    def finish(self) -> str:
        text = self._decode(self._window)
        delta = text[self._shown :]
        self._shown = len(text)
        return delta

    def _trim(self) -> None:
        del self._window[: self._chunk]
        self._chunk, self._chunk_end = 0, len(self._window)
        self._shown = len(self._decode(self._window))


def _sure_length(text: str) -> int:
    if not text.endswith(_REPLACEMENT):
        return len(text)
    return max(len(text.rstrip(_REPLACEMENT)), len(text) - _HELD_REPLACEMENTS)


class _StopCutter:
    """Cuts text before the stop string that is completed first; of those, the one begun first.

    Judging by where a stop string *ends* makes the result independent of how the text was split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._exempt = 0
        """Characters of the held text in which no stop string may end."""
        self.stopped = False
        self.found: str | None = None

    def push(self, text: str, *, exempt: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        if exempt:
            self._exempt = len(text)
        cut = self._find(text)
        if cut is not None:
            start, self.found = cut
            self.stopped, self._held = True, ""
            return text[:start]
        sure = len(text) - self._possible_beginning(text)
        self._held = text[sure:]
        self._exempt = max(0, self._exempt - sure)
        return text[:sure]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        """Where to cut, and for which stop string, if one is there."""
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, self._exempt - len(stop) + 1))) >= 0
        ]
        return min(ends)[1:] if ends else None

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


# --- reading checkpoints -------------------------------------------------------------------------


class _SpecialToken(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The part of `tokenizer_config.json` that matters here."""

    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _SpecialToken | None = None
    eos_token: str | _SpecialToken | None = None
    pad_token: str | _SpecialToken | None = None
    unk_token: str | _SpecialToken | None = None

    def special_tokens(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        values = ((name, getattr(self, name)) for name in names)
        return {
            name: token.content if isinstance(token, _SpecialToken) else token
            for name, token in values
            if token is not None
        }

    def default_template(self) -> str | None:
        if not isinstance(self.chat_template, list):
            return self.chat_template
        return next((t.template for t in self.chat_template if t.name == "default"), None)


def _load_template(path: Path) -> ChatTemplate | None:
    config = _TokenizerConfig()
    try:
        if (path / "tokenizer_config.json").exists():
            raw = (path / "tokenizer_config.json").read_bytes()
            config = msgspec.json.decode(raw, type=_TokenizerConfig)
        source = config.default_template()
        if (path / "chat_template.jinja").exists():
            source = (path / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: what msgspec and UTF-8 raise
        raise TokenizerUnusable(f"the tokenizer files of {path} are unusable: {error}") from error
    return None if source is None else ChatTemplate(source, config.special_tokens())


def _is_byte_level(encoder: tokenizers.Tokenizer) -> bool:
    return isinstance(encoder.decoder, tokenizers.decoders.ByteLevel)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves, the other bytes for the characters from
    U+0100 on, in order (the GPT-2 convention).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
