"""The type ``phi4mm``: Phi-4-multimodal as its authors publish it, with code for the configuration
as well.

That code adds some keys to Phi-3's, about what reads images and hears, and has other tokens as
defaults. Transformers has the model by now under another type, with other keys and other names of
tensors.
"""

from __future__ import annotations

from typing import Any

from transformers import Phi3Config


class Phi4MMConfig(Phi3Config):  # type: ignore[no-untyped-call]
    """As the published code calls it."""

    model_type = "phi4mm"

    vocab_size: int = 200064
    bos_token_id: int | None = 199999
    eos_token_id: int | list[int] | None = 199999
    pad_token_id: int | None = 199999
    img_processor: dict[str, Any] | None = None
    """vLLM asks for it, and published files leave it out."""
