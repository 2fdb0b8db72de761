"""Small checkpoints of models that vLLM cannot compute on a CPU, and their weights alone: placed as
an engine places them, and as plain vLLM holds them.

What a model needs besides its weights to compute (kernels, a KV cache) is not built here.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from appliance.checkpoints.model_config import read_model_config
from appliance.engines.vllm.device import HostDevice
from appliance.engines.vllm.engine import configure, headers_of
from appliance.engines.vllm.executor import ensure_expert_group
from appliance.engines.vllm.weights.placed import PlacedWeights
from appliance.engines.vllm.weights.recipe import LOAD_FORMAT, recording
from appliance.vocabulary import Task
from tests.engine.house import House, save_tokenizer
from tests.engine.shrunken import EXPERTS, HEAD_DIM, HEADS, HIDDEN, VOCAB, shrunken


def make_step(folder: Path, name: str, config: dict[str, Any]) -> str:
    """Write a Step 3.5, which transformers has no class of, with the names of published files: a
    layer of each kind of attention, without experts and with bounded ones. Its path."""
    from safetensors.torch import save_file

    small = shrunken(config)
    kinds = ["full_attention", "sliding_attention"]
    small |= {
        "num_attention_groups": 2,
        "layer_types": kinds,
        "rope_theta": config["rope_theta"][:2],
        "partial_rotary_factors": config["partial_rotary_factors"][:2],
        "attention_other_setting": {
            **config["attention_other_setting"],
            "num_attention_heads": 2 * HEADS,
            "num_attention_groups": 2,
            "head_dim": HEAD_DIM,
            "true_head_dim": HEAD_DIM,
        },
        "moe_layers_enum": "1",
        "share_expert_dim": HIDDEN // 2,
        "swiglu_limits": [0.0, 7.0],
        "swiglu_limits_shared": [0.0, 16.0],
        "rope_scaling": {**config["rope_scaling"], "original_max_position_embeddings": 1024},
    }
    wide, narrow = small["intermediate_size"], small["moe_intermediate_size"]
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    shapes["lm_head"] = (VOCAB, HIDDEN)
    for number, heads in enumerate((HEADS, 2 * HEADS)):
        own = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (heads * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (2 * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (2 * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, heads * HEAD_DIM),
            "self_attn.g_proj": (heads, HIDDEN),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
        }
        own |= _gated("moe", (EXPERTS,), narrow) if number else _gated("mlp", (), wide)
        if number:
            own |= {"moe.gate": (EXPERTS, HIDDEN), **_gated("share_expert", (), narrow)}
        shapes |= {f"model.layers.{number}.{part}": shape for part, shape in own.items()}
    dice = torch.Generator().manual_seed(sum(name.encode()))
    tensors = {f"{key}.weight": torch.randn(s, generator=dice) for key, s in shapes.items()}
    tensors["model.layers.1.moe.router_bias"] = torch.randn(EXPERTS, generator=dice)
    path = folder / name
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(small))
    save_tokenizer(path)
    return str(path)


V4: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 4, 128],
    "compress_rope_theta": 160000,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "index_head_dim": 128,
    "index_n_heads": HEADS,
    "index_topk": 512,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": HIDDEN // 2,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "o_groups": 2,
    "o_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}
"""A DeepSeek V4 with a layer of each kind: a window alone, with compressed tokens that an indexer
chooses from, and with all of more compressed ones. Experts of the first are chosen by tokens."""


def make_v4(folder: Path) -> str:
    """Write it in the type that it is computed in, with the names of DeepSeek's own files (those of
    transformers are others). Its path."""
    from safetensors.torch import save_file

    mixed, streams = (2 + V4["hc_mult"]) * V4["hc_mult"], V4["hc_mult"] * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
        "head.weight": (VOCAB, HIDDEN),
        "hc_head_fn": (V4["hc_mult"], streams),
        "hc_head_base": (V4["hc_mult"],),
        "hc_head_scale": (1,),
    }
    for number, ratio in enumerate(V4["compress_ratios"]):
        own: dict[str, tuple[int, ...]] = {}
        for part in ("attn", "ffn"):
            own |= {f"{part}_norm.weight": (HIDDEN,), f"hc_{part}_fn": (mixed, streams)}
            own |= {f"hc_{part}_base": (mixed,), f"hc_{part}_scale": (3,)}
        own |= _attention(ratio)
        width, own["ffn.gate.weight"] = V4["moe_intermediate_size"], (EXPERTS, HIDDEN)
        own["ffn.gate.bias" if number else "ffn.gate.tid2eid"] = (
            (EXPERTS,) if number else (VOCAB, V4["num_experts_per_tok"])
        )
        for expert in (*(f"experts.{n}" for n in range(EXPERTS)), "shared_experts"):
            own |= {f"ffn.{expert}.{part}.weight": (width, HIDDEN) for part in ("w1", "w3")}
            own[f"ffn.{expert}.w2.weight"] = (HIDDEN, width)
        shapes |= {f"layers.{number}.{part}": shape for part, shape in own.items()}
    dice = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0, EXPERTS, shape, generator=dice, dtype=torch.int32)
        if name.endswith("tid2eid")
        else torch.randn(shape, generator=dice)
        for name, shape in shapes.items()
    }
    path = folder / "deepseek-v4"
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(V4))
    save_tokenizer(path)
    return str(path)


def _attention(ratio: int) -> dict[str, tuple[int, ...]]:
    """Shapes of an attention layer whose tokens are compressed by `ratio`; by none with 0."""
    wide, low, out = V4["head_dim"], V4["q_lora_rank"], V4["o_groups"] * V4["o_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn.attn_sink": (HEADS,),
        "attn.wq_a.weight": (low, HIDDEN),
        "attn.wkv.weight": (wide, HIDDEN),
        "attn.wq_b.weight": (HEADS * wide, low),
        "attn.wo_a.weight": (out, HEADS * wide // V4["o_groups"]),
        "attn.wo_b.weight": (HIDDEN, out),
        "attn.q_norm.weight": (low,),
        "attn.kv_norm.weight": (wide,),
    }
    compressors = {"attn.compressor": wide} if ratio else {}
    if ratio == 4:  # of which an indexer chooses
        index = V4["index_head_dim"]
        compressors["attn.indexer.compressor"] = index
        shapes["attn.indexer.wq_b.weight"] = (V4["index_n_heads"] * index, low)
        shapes["attn.indexer.weights_proj.weight"] = (V4["index_n_heads"], HIDDEN)
    for name, size in compressors.items():
        rows = size * (2 if ratio == 4 else 1)
        shapes |= {f"{name}.{part}.weight": (rows, HIDDEN) for part in ("wkv", "wgate")}
        shapes |= {f"{name}.ape": (ratio, rows), f"{name}.norm.weight": (size,)}
    return shapes


def _gated(part: str, of: tuple[int, ...], width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a feed-forward part, or of so many experts."""
    return {
        f"{part}.gate_proj": (*of, width, HIDDEN),
        f"{part}.up_proj": (*of, width, HIDDEN),
        f"{part}.down_proj": (*of, HIDDEN, width),
    }


@dataclass(frozen=True)
class WeightsAlone:
    """The weights of a model that vLLM has built, in a house."""

    model: torch.nn.Module
    placed: PlacedWeights

    def image(self) -> dict[str, bytes]:
        """The bytes of each tensor of the master image."""
        master, layout = self.placed.weights.master, self.placed.weights.layout
        assert master is not None
        return {
            tensor.name: b"".join(map(bytes, master.views(offset, tensor.nbytes)))
            for tensor, offset in zip(layout.tensors, layout.offsets, strict=True)
        }


def place_weights(house: House, path: str, dtype: str) -> WeightsAlone:
    """Have vLLM build the model, and its weights recorded, placed, made from the files and loaded,
    all as by `VllmEngine.build`, but for a cache, a scheduler and a runner. There has to be an
    engine in this process already: the first one makes the groups of ranks."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = _configure(path, dtype, LOAD_FORMAT)
    headers = headers_of(read_model_config(Path(path)), Task.GENERATE, 0, None)
    with recording(*headers) as recorded, set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    placed = PlacedWeights.place(
        path,
        recorded,
        house.arena,
        house.host,
        house.swapper,
        HostDevice(),
        None,
        False,
        False,
        model,
    )
    placed.store(house.places(placed.weights.host_slabs, house.arena.slab_bytes), fill=True)
    placed.weights.begin_load()
    house.swapper.settle()
    return WeightsAlone(model, placed)


def plain_weights(path: str, dtype: str, placed: PlacedWeights) -> dict[str, bytes]:
    """What vLLM's own loader and processing make of the files: the bytes of each parameter, packed
    where ours are."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = _configure(path, dtype, "auto")
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    made = _parameters(model)
    for name, packing in placed.packings.items():
        pieces: list[bytes] = []

        def keep(address: int, nbytes: int, pieces: list[bytes] = pieces) -> None:
            pieces.append(ctypes.string_at(address, nbytes))

        packing.pack(model.get_parameter(name).data, keep)
        made[name] = b"".join(pieces)
    return made


def _configure(path: str, dtype: str, load_format: str) -> Any:
    chosen = {"max_model_len": 1024, "max_num_seqs": 16, "max_logprobs": 20}
    checkpoint = read_model_config(Path(path))
    about = (1, checkpoint, Task.GENERATE, HostDevice(), (0, 0))
    config = configure(about, dtype=dtype, **chosen)
    config.load_config.load_format = load_format
    ensure_expert_group(config)
    return config


def _parameters(model: torch.nn.Module) -> dict[str, bytes]:
    """The bytes of each one's storage."""
    return {
        name: _bytes(parameter.untyped_storage())
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.numel()
    }


def _bytes(storage: torch.UntypedStorage) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes())
