"""Pictures, sound and films that requests name or hold: none is fetched, decoded or loaded, as
models here read text only.

vLLM refuses most of them unseen. But where it pools a conversation it would first fetch its URLs,
from wherever they lead, and try again for a minute and more where there is no answer.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

CONNECTOR: Final = "refusing"
"""Its name, for `VLLM_MEDIA_CONNECTOR`."""


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)
class RefusingConnector(MediaConnector):  # type: ignore[misc]
    """Takes the place of what vLLM gets media with. Raises `VLLMValidationError` for all."""

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


def _refusal() -> VLLMValidationError:
    return VLLMValidationError("models here read text only: leave out pictures, sound and films")
