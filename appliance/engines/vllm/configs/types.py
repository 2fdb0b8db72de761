"""Types of published configurations that transformers reads with code of the checkpoint only, and
with classes of the appliance here."""

from __future__ import annotations

from typing import Final

from transformers import AutoConfig, PretrainedConfig

from appliance.engines.vllm.configs.new import NewConfig
from appliance.engines.vllm.configs.phi4mm import Phi4MMConfig

_KINDS: Final[tuple[type[PretrainedConfig], ...]] = (NewConfig, Phi4MMConfig)


def register_types() -> None:
    """Have transformers read such files with these classes, and no other code; call before a
    configuration or a tokenizer is read. Idempotent."""
    for kind in _KINDS:
        AutoConfig.register(kind.model_type, kind, exist_ok=True)
