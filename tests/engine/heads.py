"""Makes heads that draft, with weights that are made so that most of what they guess is right.

The next token of these models depends on the last one nearly alone: what layers add is made small.
A head that passes on the embedding of the last token, and nothing else, is right then, wherever the
rest does not tip the scales.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tests.configs import CONFIGS
from tests.engine.house import VOCAB, make_checkpoint
from tests.engine.shrunken import make_shrunken

Tensors = dict[str, Any]
TARGET: Final = "llama-mha"
"""What heads of a folder draft for."""
HIDDEN: Final = 128
OWN_HEADS: Final = ("glm-4.5-air", "deepseek-v3-bf16")
"""Published models with heads in their checkpoints."""
_ADDS: Final = ("o_proj.weight", "down_proj.weight")
"""Through these a layer adds to what passes it."""
_LITTLE: Final = 0.003
_SELF: Final = 4.0
"""So sharply does EAGLE-3's layer attend to the last token."""


def make_target(folder: Path) -> str:
    """A Llama for heads of a folder; its path."""
    path = Path(make_checkpoint(folder, TARGET))
    tensors = _read(path)
    _write(path, _adding_little(tensors))
    return str(path)


def make_eagle(folder: Path, target: str, method: str) -> str:
    """A head for a model of `make_target`; its path."""
    path = folder / method
    path.mkdir()
    config = json.loads(Path(target, "config.json").read_text())
    config["num_hidden_layers"] = 1
    if method == "eagle3":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB // 2}
        tensors = _eagle3(_read(Path(target))["lm_head.weight"])
    else:
        tensors = _eagle()
    (path / "config.json").write_text(json.dumps(config))
    _write(path, tensors)
    return str(path)


def make_with_head(folder: Path, name: str) -> str:
    """A checkpoint with a head, of a published model's architecture; its path."""
    import torch

    path = Path(make_shrunken(folder, name, CONFIGS[name]))
    config = json.loads((path / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (path / "config.json").write_text(json.dumps(config))
    tensors = _adding_little(_read(path))
    last = config["num_hidden_layers"] - 1
    head = f"model.layers.{last + 1}."
    tensors |= {
        name.replace(f"layers.{last}.", f"layers.{last + 1}."): values * (not name.endswith(_ADDS))
        for name, values in tensors.items()
        if name.startswith(f"model.layers.{last}.")
    }
    tensors |= {f"{head}{norm}.weight": torch.ones(HIDDEN) for norm in ("enorm", "hnorm")}
    tensors[f"{head}shared_head.norm.weight"] = torch.ones(HIDDEN)
    tensors[f"{head}eh_proj.weight"] = _first_half()
    # Published files have copies of what is shared.
    tensors[f"{head}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{head}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    _write(path, tensors)
    return str(path)


def _eagle() -> Tensors:
    """It adds a little of all tokens before to the embedding: what it guesses depends on its KV."""
    import torch

    torch.manual_seed(1)
    layer, mlp = "layers.0.", 2 * HIDDEN
    return {
        "fc.weight": _first_half(),
        **{f"{layer}self_attn.{name}_proj.weight": torch.eye(HIDDEN) for name in "qkv"},
        f"{layer}self_attn.o_proj.weight": torch.randn(HIDDEN, HIDDEN) * 0.1,
        f"{layer}post_attention_layernorm.weight": torch.ones(HIDDEN),
        **_no_mlp(layer, mlp),
    }


def _eagle3(target_head: Any) -> Tensors:
    """It knows every other token. The embedding comes through its attention alone, which sees the
    last token and none before."""
    import torch

    layer, mlp = "midlayer.", 2 * HIDDEN
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    kept = torch.arange(0, VOCAB, 2)
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[kept] = True
    return {
        "fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN),
        f"{layer}self_attn.q_proj.weight": _SELF * _first_half(),
        f"{layer}self_attn.k_proj.weight": _SELF * _first_half(),
        f"{layer}self_attn.v_proj.weight": _first_half(),
        f"{layer}self_attn.o_proj.weight": torch.eye(HIDDEN),
        **{f"{layer}{norm}.weight": torch.ones(HIDDEN) for norm in norms},
        **_no_mlp(layer, mlp),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": target_head[kept].clone(),
        "d2t": kept - torch.arange(len(kept)),
        "t2d": known,
    }


def _no_mlp(layer: str, width: int) -> Tensors:
    import torch

    return {
        f"{layer}mlp.gate_proj.weight": torch.ones(width, HIDDEN),
        f"{layer}mlp.up_proj.weight": torch.ones(width, HIDDEN),
        f"{layer}mlp.down_proj.weight": torch.zeros(HIDDEN, width),
    }


def _first_half() -> Any:
    """A projection of two vectors that keeps the first: that of the token."""
    import torch

    return torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), dim=1)


def _adding_little(tensors: Tensors) -> Tensors:
    return {
        name: values * (_LITTLE if name.endswith(_ADDS) else 1) for name, values in tensors.items()
    }


def _read(path: Path) -> Tensors:
    from safetensors.torch import load_file

    return dict(load_file(path / "model.safetensors"))


def _write(path: Path, tensors: Tensors) -> None:
    from safetensors.torch import save_file

    whole = {name: values.contiguous() for name, values in tensors.items()}
    save_file(whole, path / "model.safetensors", metadata={"format": "pt"})
