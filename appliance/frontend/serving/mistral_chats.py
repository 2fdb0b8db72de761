"""Chats whose prompts mistral_common makes: it gets text, reasoning, and the lengths of sounds.

vLLM hands it the messages as clients send them, and reads them otherwise itself: a part that vLLM
takes for a reference may be a sound to the other. mistral_common, and transformers in front of it,
would open files, fetch URLs, and decode sounds and images of any size. So every part is made anew
of what is known of it, and all others are refused. Of a sound, the prompt needs the number of
tokens, which follows from the samples that were decoded before
(`appliance.frontend.serving.media`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from mistral_common.exceptions import InvalidRequestException
from mistral_common.protocol.instruct.chunk import AudioChunk
from mistral_common.tokens.tokenizers.audio import Audio, AudioEncoder, AudioEncoding
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer
from vllm.tokenizers.mistral import MistralTokenizer

from appliance.checkpoints.architectures.chat_sounds import RATE, SECONDS
from appliance.frontend.calls import current
from appliance.frontend.sound.chats import ChatSound, sound_of

_MOST: Final = SECONDS * RATE
_OURS: Final = frozenset({"padding", "truncation", "max_length", "tokenize"})
"""Of a body's `chat_template_kwargs`: they could have a prompt padded to any length."""
_SILENT: Final = frozenset({"assistant", "tool"})
"""Roles in whose messages mistral_common takes no sounds."""


def guard_chats(renderer: BaseRenderer, *, sounds: bool) -> None:
    """Have a model's renderer make prompts of chats so, if mistral_common makes them. Once, before
    its first call; `sounds` says whether the model reads any."""
    tokenizer = renderer.tokenizer
    if not isinstance(tokenizer, MistralTokenizer):
        return
    instruct = tokenizer.instruct
    # What parts become is the bound; these would be opened or fetched behind it.
    instruct.image_encoder = None
    if sounds:
        # vLLM would prepare one sound first, as long as the longest prompt: hours of silence.
        renderer._mm_warmup_done = True
        known = instruct.audio_encoder
        instruct.audio_encoder = _Counter(known.audio_config, known.special_ids)
    else:
        instruct.audio_encoder = None
    apply, apply_in_thread = tokenizer.apply_chat_template, renderer._apply_chat_template_async

    def guarded(messages: Sequence[Any], tools: Any = None, **kwargs: Any) -> Any:
        kept = {key: value for key, value in kwargs.items() if key not in _OURS}
        return apply(_all_known(messages), tools, **kept)

    async def measured(tokenizer: Any, messages: Sequence[Any], **kwargs: Any) -> Any:
        # The call is known here, and not in the thread.
        lengths = current.get().samples if sounds else None
        return await apply_in_thread(tokenizer, _all_known(messages, lengths), **kwargs)

    tokenizer.apply_chat_template = guarded
    renderer._apply_chat_template_async = measured


class _Length(dict[str, Any]):
    """The part of a sound with the number of its samples; no client can send one."""


class _Counter(AudioEncoder):
    """Takes the place of what makes tokens of sounds: a sound is the number of its samples."""

    def __call__(self, content: Any) -> AudioEncoding:
        """Raises `InvalidRequestException` for what is a sound, and no number of samples."""
        said = content.input_audio if isinstance(content, AudioChunk) else ""
        few = isinstance(said, str) and said.isdecimal() and len(said) <= len(str(_MOST))
        if not (few and 0 < int(said) <= _MOST):
            raise InvalidRequestException("sounds are read from /v1/chat/completions alone")
        padded = self.next_multiple_of_chunk_frames(int(said), RATE)
        audio = Audio(np.zeros(1, np.float32), RATE, "wav")  # which has no use
        return AudioEncoding(self._encode_audio_tokens(padded), audio)


def _all_known(messages: Sequence[Any], lengths: Mapping[int, int] | None = None) -> list[Any]:
    return [_known(message, f"messages[{i}]", lengths) for i, message in enumerate(messages)]


def _known(message: Any, name: str, lengths: Mapping[int, int] | None) -> Any:
    """A message with its parts made anew. Without `lengths`, the model reads no sounds."""
    content = message.get("content") if isinstance(message, dict) else None
    if content is None or isinstance(content, str):
        return message
    return {**message, "content": list(_parts(message.get("role"), content, name, lengths))}


def _parts(
    role: object, content: Any, name: str, lengths: Mapping[int, int] | None
) -> Iterator[dict[str, Any]]:
    """Raises `VLLMValidationError` for a part that is none of those that are known, and for a
    sound that was not decoded."""
    for number, part in enumerate(content):
        if isinstance(part, _Length):
            yield part
            continue
        at = f"{name}.content[{number}]"
        fields: Mapping[str, Any] = part if isinstance(part, dict) else {}
        sound = sound_of(at, fields)
        if sound is not None and lengths is not None and role not in _SILENT:
            yield _length(sound, lengths)
        elif sound is None and (written := _written(fields)) is not None:
            yield written
        else:
            raise VLLMValidationError(
                f"{at}: send text, in a part of the type text with the field text", parameter=at
            )


def _written(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """A part with text or reasoning made anew; None if it has neither."""
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "thinking", "thinking": str(text)}:
            closed = part.get("closed")
            how = {"closed": closed} if isinstance(closed, bool) else {}
            return {"type": "thinking", "thinking": text, **how}
    return None


def _length(sound: ChatSound, lengths: Mapping[int, int]) -> _Length:
    samples = lengths.get(sound.key())
    if samples is None:
        raise VLLMValidationError(
            f"{sound.name}: send a sound in a part of its own, without other fields",
            parameter=sound.name,
        )
    said = {"data": str(samples), "format": "wav"}
    return _Length(type="input_audio", input_audio=said)
