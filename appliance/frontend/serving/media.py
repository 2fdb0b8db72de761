"""Images and sounds that requests send, decoded for vLLM. Nothing is fetched here, and no film is
read.

One is decoded only if it was found and looked at in the call's body before
(`appliance.frontend.images`, `appliance.frontend.sound.chats`). The threads that decode and prepare
it belong to the call's turn.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal import image as vllm_image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, ImageMediaIO, MediaConnector
from vllm.renderers import BaseRenderer

from appliance.checkpoints.architectures.chat_sounds import RATE, SECONDS
from appliance.frontend.calls import current
from appliance.frontend.image_files import FORMATS, MAX_PIXELS, BadImage, decoded_url
from appliance.frontend.images import in_thread, key_of_url, threads
from appliance.frontend.sound.chats import decoded_url as decoded_sound
from appliance.frontend.sound.chats import key_of_url as key_of_sound
from appliance.frontend.sound.files import BadSound, decoded

log = logging.getLogger(__name__)

CONNECTOR: Final = "refusing"
"""Its name, for `VLLM_MEDIA_CONNECTOR`."""


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)
class RefusingConnector(MediaConnector):  # type: ignore[misc]
    """Takes the place of what vLLM gets media with: gives images and sounds that the call may use.
    Raises `VLLMValidationError` for all others."""

    async def fetch_image_async(self, image_url: str, *, image_mode: str | None = "RGB") -> Any:
        call = current.get()
        key = key_of_url(image_url)
        name = call.images.get(key)
        if name is None:
            raise VLLMValidationError(
                "images are read from the messages of one chat: send them there, and not in a "
                "batch of chats, in what is only rendered, or in a stored response"
            )
        file = call.fetched.get(key)
        return await in_thread(call, threads, _decoded, name, image_url, file, image_mode)

    async def fetch_audio_async(self, audio_url: str) -> Any:
        call = current.get()
        key = key_of_sound(audio_url)
        name = call.sounds.get(key)
        if name is None:
            raise VLLMValidationError(
                "sounds are read from the messages of one chat (/v1/chat/completions): send them "
                "there, and not in a batch of chats, or in what is only rendered"
            )
        samples = await in_thread(call, threads, _sound, name, audio_url)
        call.samples[key] = len(samples)
        return samples, RATE

    def fetch_audio(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal()

    def fetch_image(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal()

    def load_from_url(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal()

    async def load_from_url_async(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal()

    def fetch_image_embedding(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal()

    async def fetch_image_embedding_async(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal()

    def fetch_audio_embedding(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal()

    async def fetch_audio_embedding_async(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal()


def bound_images() -> None:
    """Have vLLM and Pillow decode no other formats and no larger images than are looked at."""
    vllm_image.ALLOWED_IMAGE_FORMATS = FORMATS
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS


def prepare_in_turns(renderer: BaseRenderer) -> None:
    """Have what a model's renderer makes of images and sounds belong to the turn of the call that
    sent them. Once, before its first call. It raises `VLLMValidationError` for what the
    checkpoint's processor does not take."""

    def prepare(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        call = current.get()
        work = partial(renderer._process_multimodal, *args, **kwargs)
        return in_thread(call, renderer._mm_executor, _prepared, work, call.images, call.sounds)

    renderer._process_multimodal_async = prepare


def _prepared(work: Callable[[], Any], images: Mapping[int, str], sounds: Mapping[int, str]) -> Any:
    """What vLLM makes of media with these names; its own error shows objects of Python."""
    try:
        return work()
    except ValueError as error:
        if not (images or sounds) or not str(error).startswith("Failed to apply "):
            raise
        log.info("images or sounds were not prepared: %r", error.__cause__)
        names = list((images or sounds).values())
        word, other = ("sound", "length") if sounds else ("image", "shape")
        raise VLLMValidationError(
            f"{', '.join(names)}: the model's {word} processor does not take "
            f"{f'this {word}' if len(names) == 1 else f'one of these {word}s'}: send one of "
            f"another {other}",
            parameter=names[0],
        ) from error


def _decoded(name: str, url: str, file: bytes | None, mode: str | None) -> Any:
    """The image as vLLM has it: pixels, and the file, which is in the URL if it was not fetched.
    Raises `VLLMValidationError`."""
    try:
        file = decoded_url(url) if file is None else file
        return ImageMediaIO(image_mode=mode).load_bytes(file)
    except BadImage as error:
        raise VLLMValidationError(f"{name}: {error}", parameter=name) from error
    except Exception as error:  # of Pillow's readers, which are many
        raise VLLMValidationError(f"{name}: it is damaged: {error}", parameter=name) from error


def _sound(name: str, url: str) -> npt.NDArray[np.float32]:
    """The samples of the sound, of `RATE`. Raises `VLLMValidationError`."""
    try:
        # A resampler may make one sample more of the longest sound than there is room for.
        return decoded(decoded_sound(url), RATE)[: SECONDS * RATE]
    except BadSound as error:
        raise VLLMValidationError(f"{name}: {error}", parameter=name) from error


def _refusal() -> VLLMValidationError:
    return VLLMValidationError(
        "no model here reads films or embeddings: send text, images or sounds in messages"
    )
