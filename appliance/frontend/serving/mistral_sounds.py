"""Sounds in chats whose prompts mistral_common makes (Voxtral): it gets the length of each, and
not the sound itself.

vLLM hands it the messages as clients send them, and it would decode each sound once more, fetch
URLs and read files. What it needs is how many tokens a sound is, and that follows from the samples
which were decoded before (`appliance.frontend.serving.media`).
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


def count_sounds(renderer: BaseRenderer) -> None:
    """Have a model's renderer make prompts of chats so, if mistral_common makes them. Once, before
    its first call."""
    tokenizer = renderer.get_tokenizer()
    if not isinstance(tokenizer, MistralTokenizer):
        return
    # vLLM would prepare one sound first, as long as the longest prompt: hours of silence.
    renderer._mm_warmup_done = True
    known = tokenizer.instruct.audio_encoder
    tokenizer.instruct.audio_encoder = _Counter(known.audio_config, known.special_ids)
    apply = renderer._apply_chat_template_async

    async def counting(tokenizer: Any, messages: Sequence[Any], **kwargs: Any) -> Any:
        lengths = current.get().samples
        measured = [
            _measured(message, f"messages[{i}]", lengths) for i, message in enumerate(messages)
        ]
        return await apply(tokenizer, measured, **kwargs)

    renderer._apply_chat_template_async = counting


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


def _measured(message: Any, name: str, lengths: Mapping[int, int]) -> Any:
    """A message with the number of samples in place of each sound."""
    content = message.get("content") if isinstance(message, dict) else None
    if content is None or isinstance(content, str):
        return message
    return {**message, "content": list(_parts(content, name, lengths))}


def _parts(content: Any, name: str, lengths: Mapping[int, int]) -> Iterator[Any]:
    """Raises `VLLMValidationError` for a sound that was not decoded."""
    for number, part in enumerate(content):
        at = f"{name}.content[{number}]"
        sound = sound_of(at, part) if isinstance(part, dict) else None
        yield part if sound is None else _length(sound, lengths)


def _length(sound: ChatSound, lengths: Mapping[int, int]) -> dict[str, Any]:
    samples = lengths.get(sound.key())
    if samples is None:
        raise VLLMValidationError(
            f"{sound.name}: send a sound in a part of its own, without other fields",
            parameter=sound.name,
        )
    return {"type": "input_audio", "input_audio": {"data": str(samples), "format": "wav"}}
