"""What demo models are made of: their shapes, configurations and random weights, by family."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

VOCABULARY_SIZE: Final = 2048
MAX_POSITIONS: Final = 2048
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS: Final = (BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>")
BOS_ID, EOS_ID, PAD_ID = range(3)

WINDOW: Final = 64
"""Tokens that layers with a sliding window look back at; chats are longer."""
EXPERTS: Final = 4
EXPERTS_PER_TOKEN: Final = 2
STATE_HEAD_DIM: Final = 64
STATE_SIZE: Final = 32
"""Numbers that a head of a layer with a state (Mamba 2) keeps for each of its dimensions."""
CONVOLUTION: Final = 4
GROUP: Final = 64
"""Rows that share a factor, where weights are in 4 bits."""

Tensors: TypeAlias = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The shape of one demo model; `family` is the model type of its ``config.json``."""

    name: str
    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int
    quantized: bool = False
    """Whether its linear layers are stored in 4 bits, by GPTQ."""

    @property
    def dtype(self) -> str:
        """What it is computed in: the CPU computes with 4 bits in 16 bits only."""
        return "float16" if self.quantized else "float32"


RECIPES: Final = tuple(
    Recipe(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seed=seed,
    )
    for seed, (
        name, family, layers, hidden, intermediate, heads, kv_heads, head_dim
    ) in enumerate(
        (
            ("llama-a", "llama", 4, 256, 768, 4, 4, 64),
            ("llama-b", "llama", 4, 320, 896, 10, 10, 32),
            ("llama-c", "llama", 4, 288, 768, 3, 3, 96),
            ("qwen2-a", "qwen2", 4, 256, 896, 4, 2, 64),
            ("qwen2-b", "qwen2", 3, 384, 768, 6, 2, 64),
            ("qwen3-a", "qwen3", 6, 256, 640, 4, 2, 128),
        ),
        start=1,
    )
)  # fmt: skip
"""Dense models: six shapes of KV cache."""

KINDS: Final = (
    Recipe(
        name="mixtral-a", family="mixtral", layers=3, hidden=256, intermediate=384,
        heads=4, kv_heads=2, head_dim=64, seed=7,
    ),
    Recipe(
        name="mistral-a", family="mistral", layers=4, hidden=256, intermediate=896,
        heads=4, kv_heads=2, head_dim=64, seed=8,
    ),
    Recipe(
        name="granite-h-a", family="granitemoehybrid", layers=4, hidden=256, intermediate=768,
        heads=4, kv_heads=2, head_dim=64, seed=9,
    ),
    Recipe(
        name="qwen3-4bit-a", family="qwen3", layers=6, hidden=512, intermediate=1536,
        heads=4, kv_heads=2, head_dim=128, seed=10, quantized=True,
    ),
)  # fmt: skip
"""A mixture of experts, a model with a sliding window, one in which every other layer keeps a
state, and one with weights in 4 bits."""

DEMO: Final = ("mixtral-a", "mistral-a", "granite-h-a", "qwen3-4bit-a", "llama-b", "qwen2-b")
"""What the demonstration serves. The one with experts is the first: in a process of plain vLLM,
none can come after a model without."""

_INSTEAD: Final = {"qwen3-4bit-a": "qwen3-a"}
"""What is served where the CPU does not compute with 4 bits."""

ARCHITECTURES: Final = {
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""By family."""


def demo_models(*, four_bits: bool) -> tuple[str, ...]:
    """What the demonstration serves on a CPU which computes with weights in 4 bits, or does not."""
    return DEMO if four_bits else tuple(_INSTEAD.get(name, name) for name in DEMO)


def model_config(recipe: Recipe) -> dict[str, Any]:
    """Its ``config.json``."""
    config = {
        "architectures": [ARCHITECTURES[recipe.family]],
        "model_type": recipe.family,
        "dtype": recipe.dtype,
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if recipe.quantized:
        config |= {"quantization_config": _QUANTIZATION}
    match recipe.family:
        case "mistral":
            return config | {"sliding_window": WINDOW}
        case "mixtral":
            experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS_PER_TOKEN}
            return config | {"sliding_window": None, **experts}
        case "granitemoehybrid":
            return config | _hybrid(recipe)
    return config


_QUANTIZATION: Final = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "desc_act": False,
}


def _hybrid(recipe: Recipe) -> dict[str, Any]:
    """What is said of layers that keep a state, and of scales that other families do not have."""
    return {
        "layer_types": [_kind(layer) for layer in range(recipe.layers)],
        "position_embedding_type": "rope",
        "shared_intermediate_size": recipe.intermediate,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": True,
        "mamba_d_conv": CONVOLUTION,
        "mamba_d_head": STATE_HEAD_DIM,
        "mamba_d_state": STATE_SIZE,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 2 * recipe.hidden // STATE_HEAD_DIM,
        "mamba_proj_bias": False,
        "attention_multiplier": 1 / math.sqrt(recipe.head_dim),
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    }


def _kind(layer: int) -> str:
    """Of a layer of a hybrid: every other one keeps a state."""
    return "attention" if layer % 2 else "mamba"


class _Dice:
    """Normal float32 matrices from one seeded PCG64 stream, drawn in a fixed order."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def vector(self, size: int, std: float) -> NDArray[np.float32]:
        return self._generator.standard_normal(size, dtype=np.float32) * np.float32(std)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        """A projection that multiplies the length of a random input by about `gain`."""
        drawn = self._generator.standard_normal((rows, columns), dtype=np.float32)
        return drawn * np.float32(gain / math.sqrt(columns))


def weights(recipe: Recipe) -> Tensors:
    """Its tensors by name, as a checkpoint stores them."""
    tensors = _numbers(recipe)
    return _quantized(tensors) if recipe.quantized else tensors


def _quantized(tensors: Tensors) -> Tensors:
    """The same, linear layers of GPTQ in 4 bits, and the rest in 16."""
    stored: Tensors = {}
    for name, values in tensors.items():
        if name.endswith("_proj.weight"):
            stored |= _gptq(name.removesuffix("weight"), values.T)
        else:
            stored[name] = values.astype(np.float16)
    return stored


def _gptq(prefix: str, weight: NDArray[np.float32]) -> Tensors:
    """Of a weight ``[in, out]``: symmetric, eight rows in a word, the first in its lowest bits."""
    rows, columns = weight.shape
    groups = weight.reshape(rows // GROUP, GROUP, columns)
    scales = np.abs(groups).max(axis=1) / 7
    numbers = np.round(groups / scales[:, None]).astype(np.int64) + 8
    places = 4 * np.arange(8)[:, None]
    words = (numbers.reshape(rows // 8, 8, columns) << places).sum(axis=1)
    return {
        f"{prefix}qweight": words.astype(np.uint32).view(np.int32),
        f"{prefix}qzeros": np.full((rows // GROUP, columns // 8), 0x77777777, np.int32),
        f"{prefix}scales": scales.astype(np.float16),
        f"{prefix}g_idx": np.repeat(np.arange(rows // GROUP, dtype=np.int32), GROUP),
    }


def _numbers(recipe: Recipe) -> Tensors:
    dice = _Dice(recipe.seed)
    embedding = dice.matrix(VOCABULARY_SIZE, recipe.hidden, gain=math.sqrt(recipe.hidden))
    head = dice.matrix(VOCABULARY_SIZE, recipe.hidden)
    # Greedy text can end by itself (EOS), but never contains the other special tokens.
    head[[id_ for id_ in range(len(SPECIAL_TOKENS)) if id_ != EOS_ID]] = 0.0
    tensors: Tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(recipe.hidden, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(recipe.layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = np.ones(recipe.hidden, np.float32)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = np.ones(recipe.hidden, np.float32)
        if recipe.family == "granitemoehybrid" and _kind(layer) == "mamba":
            tensors |= _mamba(f"{prefix}.mamba", recipe, dice)
        else:
            tensors |= _attention(f"{prefix}.self_attn", recipe, dice)
        match recipe.family:
            case "mixtral":
                tensors |= _experts(f"{prefix}.block_sparse_moe", recipe, dice)
            case "granitemoehybrid":
                tensors |= _shared_mlp(f"{prefix}.shared_mlp", recipe, dice)
            case _:
                tensors |= _mlp(f"{prefix}.mlp", recipe, dice)
    return tensors


def _attention(prefix: str, recipe: Recipe, dice: _Dice) -> Tensors:
    queries, keys = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    # Sharp attention (large queries and keys) makes each token depend on particular earlier ones.
    tensors: Tensors = {
        f"{prefix}.q_proj.weight": dice.matrix(queries, recipe.hidden, gain=1.5),
        f"{prefix}.k_proj.weight": dice.matrix(keys, recipe.hidden, gain=1.5),
        f"{prefix}.v_proj.weight": dice.matrix(keys, recipe.hidden),
        f"{prefix}.o_proj.weight": dice.matrix(recipe.hidden, queries, gain=1.5),
    }
    if recipe.family == "qwen2":
        for projection, size in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{prefix}.{projection}_proj.bias"] = dice.vector(size, 0.1)
    if recipe.family == "qwen3":
        for norm in ("q_norm", "k_norm"):
            tensors[f"{prefix}.{norm}.weight"] = np.full(recipe.head_dim, 1.5, np.float32)
    return tensors


def _mlp(prefix: str, recipe: Recipe, dice: _Dice) -> Tensors:
    return {
        f"{prefix}.gate_proj.weight": dice.matrix(recipe.intermediate, recipe.hidden, gain=1.5),
        f"{prefix}.up_proj.weight": dice.matrix(recipe.intermediate, recipe.hidden, gain=1.5),
        f"{prefix}.down_proj.weight": dice.matrix(recipe.hidden, recipe.intermediate),
    }


def _experts(prefix: str, recipe: Recipe, dice: _Dice) -> Tensors:
    tensors: Tensors = {f"{prefix}.gate.weight": dice.matrix(EXPERTS, recipe.hidden, gain=2.0)}
    for expert in range(EXPERTS):
        one = f"{prefix}.experts.{expert}"
        tensors |= {
            f"{one}.w1.weight": dice.matrix(recipe.intermediate, recipe.hidden, gain=1.5),
            f"{one}.w3.weight": dice.matrix(recipe.intermediate, recipe.hidden, gain=1.5),
            f"{one}.w2.weight": dice.matrix(recipe.hidden, recipe.intermediate),
        }
    return tensors


def _shared_mlp(prefix: str, recipe: Recipe, dice: _Dice) -> Tensors:
    """The MLP of `_mlp`, with the gate and what it gates in one matrix."""
    return {
        f"{prefix}.input_linear.weight": dice.matrix(
            2 * recipe.intermediate, recipe.hidden, gain=1.5
        ),
        f"{prefix}.output_linear.weight": dice.matrix(recipe.hidden, recipe.intermediate),
    }


def _mamba(prefix: str, recipe: Recipe, dice: _Dice) -> Tensors:
    """A layer of Mamba 2 whose heads forget at different rates, some within a few tokens."""
    width = 2 * recipe.hidden
    heads = width // STATE_HEAD_DIM
    convolved = width + 2 * STATE_SIZE
    return {
        f"{prefix}.in_proj.weight": dice.matrix(width + convolved + heads, recipe.hidden, gain=1.5),
        f"{prefix}.conv1d.weight": dice.matrix(convolved, CONVOLUTION, gain=1.5)[:, None],
        f"{prefix}.conv1d.bias": dice.vector(convolved, 0.1),
        f"{prefix}.A_log": np.log(np.linspace(1, 16, heads, dtype=np.float32)),
        f"{prefix}.D": np.ones(heads, np.float32),
        f"{prefix}.dt_bias": np.linspace(-5, 0, heads, dtype=np.float32),
        f"{prefix}.norm.weight": np.ones(width, np.float32),
        f"{prefix}.out_proj.weight": dice.matrix(recipe.hidden, width),
    }
