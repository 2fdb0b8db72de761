"""LoRA adapters for tests, as PEFT saves them."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")
ALL: Final = (*ATTENTION, *MLP)


def make_adapter(
    folder: Path,
    base: str,
    *,
    rank: int = 8,
    targets: Collection[str] = ALL,
    dtype: str = "float32",
    seed: int = 0,
    size: float = 0.2,
    ranks: dict[str, int] | None = None,
    **said: Any,
) -> str:
    """Random numbers for all layers of the `base` that are called so. `said` are further keys of
    its configuration, `ranks` those of layers that have another one. Returns its path."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    dice = torch.Generator().manual_seed(seed)
    tensors = {}
    (weights,) = Path(base).glob("*.safetensors")
    with safe_open(weights, framework="pt") as stored:
        for name in sorted(stored.keys()):
            layer = name.removesuffix(".weight")
            last = layer.rpartition(".")[2]
            if last not in targets or name == layer:
                continue
            rows, columns = stored.get_slice(name).get_shape()
            r = (ranks or {}).get(last, rank)
            for part, shape in (("A", (r, columns)), ("B", (rows, r))):
                values = torch.randn(shape, generator=dice) * size
                full = f"base_model.model.{layer}.lora_{part}.weight"
                tensors[full] = values.to(getattr(torch, dtype))
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(targets),
        "bias": "none",
        **({"rank_pattern": ranks} if ranks else {}),
        **said,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
