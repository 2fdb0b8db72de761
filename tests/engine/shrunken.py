"""Makes small checkpoints of the architectures of published models: the same layers, fewer and
narrower, with random weights."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any, Final

from appliance.checkpoints.language_models import TRANSPOSED_EXPERTS
from tests.engine.house import EOS, save_tokenizer

HIDDEN, HEADS, HEAD_DIM, LAYERS, EXPERTS = 128, 4, 32, 2, 4
VOCAB = 2048
"""So many that a head takes several slabs."""
WINDOW = 48
"""Shorter than prompts, and no multiple of a block."""
CHUNK = 64
"""Of layers that attend to chunks: shorter than prompts, and a multiple of a block."""
POSITIONS = 4096
NEVER_SAID = 3
"""Gemma 4 says no token whose number is a multiple of this."""

SIZES: Final[dict[str, int]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "word_embed_proj_dim", "d_model"), HIDDEN),
    **dict.fromkeys(("block_dim", "conv_dim"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "shared_intermediate_size"), 2 * HIDDEN),
    **dict.fromkeys(("block_ff_dim", "n_inner", "ffn_hidden_size"), 2 * HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "max_window_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), POSITIONS),
    "max_seq_len": POSITIONS,
    "rotary_dim": HEAD_DIM // 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    "moe_num_experts": EXPERTS,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), HIDDEN // 2),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_dense_layers", "moe_layer_end_index"), 1),
    "num_nextn_predict_layers": 0,
    # Layers that keep a state.
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 4),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("mamba_d_ssm",), 2 * HIDDEN),
    "n_groups": 2,
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 8),
    **dict.fromkeys(("num_kv_heads", "kv_n_heads"), 2),
    "num_kv_heads": 2,
    "global_head_dim": 2 * HEAD_DIM,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 16,
    "top_k_experts": 2,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "sliding_window": WINDOW,
    "attention_chunk_size": CHUNK,
    "intermediate_size_mlp": 2 * HIDDEN,
    "original_max_position_embeddings": 1024,
    "query_pre_attn_scalar": HEAD_DIM,
    # What is left of a latent is not made smaller: kernels know a few sizes.
    "q_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
_SAME_AS: Final = {"kimi_k2": "deepseek_v3", "phi4mm": "phi3"}
"""Types that transformers has under another name only."""
_CODE_UNUSED: Final = frozenset({"phi4mm"})
"""Types whose files name code, and are read without: what lies there would end the process."""
_CLASSES: Final = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "MistralLarge3ForCausalLM": "DeepseekV3ForCausalLM",
    "Phi4MMForCausalLM": "Phi3ForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
"""Architectures that transformers spells otherwise by now, or has under another name."""
_MISTRAL: Final = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "tok_embeddings."),
    (r"^lm_head\.", "output."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.(q|kv)_a_layernorm\.", r".attention.\1_a_norm."),
    (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attention.wkv_a_with_mqa."),
    (r"\.self_attn\.(q_a|q_b|kv_b|o)_proj\.", r".attention.w\1."),
    (r"\.mlp\.(experts|shared_experts|gate)\.", r".\1."),
    (r"\.mlp\.", ".feed_forward."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)
"""What Mistral's files call tensors of DeepSeek V3: patterns and replacements, in their order."""
_PATTERN: Final = "M*-"
"""A layer of each kind: Mamba, attention, and neither."""
_BLOCKS: Final = ["mamba", "hybrid", "mamba", "hybrid", "hybrid"]
"""Those with attention take turns with two sets of its weights."""
_NORMS: Final = ("norm", ".ln_attn.", ".ln_mlp.")
"""In names of weights that stay as they are."""
_OWN: Final[dict[str, dict[str, Any]]] = {
    "hunyuan_v1_moe": {
        "attention_head_dim": HEAD_DIM,
        "moe_intermediate_size": 2 * HIDDEN,
        "moe_topk": 2,
        "num_shared_expert": 1,
    },
    # A layer of linear attention without experts, one with them, and one of full attention.
    "kimi_linear": {
        "num_experts_per_token": 2,
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "full_attn_layers": [3],
            "head_dim": HEAD_DIM,
            "num_heads": HEADS,
            "short_conv_kernel_size": 4,
        },
    },
    "longcat_flash": {
        "expert_ffn_hidden_size": HIDDEN // 2,
        "moe_topk": 2,
        "num_layers": LAYERS,
        "zero_expert_num": 2,
    },
    # Keys and values of different sizes, and more heads for them in layers with windows.
    "mimo_v2_flash": {
        **dict.fromkeys(("head_dim", "swa_head_dim"), 3 * HEAD_DIM),
        **dict.fromkeys(("v_head_dim", "swa_v_head_dim"), 2 * HEAD_DIM),
        "swa_num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "swa_num_key_value_heads": 2,
        "sliding_window_size": WINDOW,
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
    },
    # Heads are as wide as the embedding, twice.
    "mamba2": {"num_heads": 2 * HIDDEN // HEAD_DIM},
    "zamba2": {
        "n_mamba_heads": 4,
        "mamba_headdim": 2 * HIDDEN // 4,
        "attention_head_dim": 2 * HIDDEN // HEADS,
        "attention_hidden_size": 2 * HIDDEN,
        "adapter_rank": 8,
    },
    # Experts are weighted before they compute, so that a token has one of them.
    "llama4_text": {"num_experts_per_tok": 1},
    # A matrix of experts has other sizes than its transposed one.
    "qwen3_vl_moe_text": {"moe_intermediate_size": 96},
    # Its patches are read by fours.
    "llama4_vision_model": {"intermediate_size": 4 * HIDDEN},
    # What an encoder makes of sound is as long as published models have it.
    "whisper": {
        **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2 * HIDDEN),
        "decoder_start_token_id": 1,
    },
    "qwen2_audio_encoder": {
        "encoder_layers": LAYERS,
        "encoder_attention_heads": HEADS,
        "encoder_ffn_dim": 2 * HIDDEN,
        "d_model": HIDDEN,
    },
    "voxtral_encoder": {"intermediate_size": 4 * HIDDEN, "head_dim": HEAD_DIM},
}
"""Of a type."""
_PERIODIC: Final = ("layer_types", "mlp_layer_types", "is_moe_layer", "no_rope_layers")
_PARTS: Final = ("attn_config", "ffn_config")
"""Of a configuration, each with sizes of its own."""
_LEFT_OUT: Final[dict[str, dict[str, int]]] = {
    "gemma3_text": {"vocab_size": VOCAB, "sliding_window_pattern": 2},
    "llama": {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
    },
}
"""What files of a type leave to transformers' defaults, which are those of a large model."""
_VISION: Final[dict[str, Any]] = {
    **dict.fromkeys(("hidden_size", "out_hidden_size", "embed_dim"), HIDDEN),
    "intermediate_size": 2 * HIDDEN,
    **dict.fromkeys(("num_hidden_layers", "depth"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), HEADS),
    "head_dim": HEAD_DIM,
    "image_size": 56,
    "patch_size": 14,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    **dict.fromkeys(
        ("vision_output_dim", "projector_input_dim", "projector_output_dim"), 2 * HIDDEN
    ),
}
"""Of a tower that reads images."""
_AUDIO: Final = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS}
"""Of a tower that hears."""
_UNEQUAL: Final = 3
"""Layers of Gemma 3n and 4 that keep KV: two with a window, and one without."""
_PER_LAYER: Final = 32
"""Numbers of an embedding for each layer."""
_TIED: Final = frozenset({"gemma3", "gemma3n", "gemma4"})
"""Types of models that read more than text, of which files leave out that the head is the
embedding."""


def shrunken(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the small checkpoint."""
    small = copy.deepcopy(config)
    for part in (small, small.get("text_config")):
        if isinstance(part, dict):
            _shrink(part)
    for name in _PARTS:
        if isinstance(part := small.get(name), dict):
            part.update((key, size) for key, size in SIZES.items() if key in part)
    if isinstance(vision := small.get("vision_config"), dict):
        vision.update((key, value) for key, value in _VISION.items() if key in vision)
        vision.update(_OWN.get(vision.get("model_type", ""), {}))
    if isinstance(audio := small.get("audio_config"), dict):
        audio.update((key, value) for key, value in _AUDIO.items() if key in audio)
        audio.update(_OWN.get(audio.get("model_type", ""), {}))
    small["torch_dtype"] = "float32"
    if small.get("model_type") not in _CODE_UNUSED:
        small.pop("auto_map", None)
    return small


def _shrink(part: dict[str, Any]) -> None:
    if "mamba" in part.get("layer_types", ()):
        part["layer_types"] = sorted(set(part["layer_types"]))
    layers = _layers(part)
    given = {key: value for key, value in part.items() if value is not None}
    for key, size in SIZES.items():
        if key in given or key.endswith("_token_id"):
            part[key] = size
    for key in ("num_hidden_layers", "n_layer", "max_window_layers"):
        if key in given:
            part[key] = layers
    if "num_key_value_heads" in given:
        shared = given["num_attention_heads"] // given["num_key_value_heads"]
        part["num_key_value_heads"] = max(1, HEADS // shared)
    if "head_dim" in given:
        part["head_dim"] = HEAD_DIM
    for key, size in _LEFT_OUT.get(part.get("model_type", ""), {}).items():
        if key not in given:
            part[key] = size
    part.update(_OWN.get(part.get("model_type", ""), {}))
    if "num_kv_shared_layers" in given:
        _shrink_unequal(part)
    if "llama_4_scaling" in given:  # so that queries of prompts are scaled
        part["llama_4_scaling"]["original_max_position_embeddings"] = 2 * WINDOW // 3
    for key in _PERIODIC:
        if key in given:
            part[key] = part[key][:layers]
    if "hybrid_override_pattern" in given:
        part["hybrid_override_pattern"] = _PATTERN
    if "layers_block_type" in given:
        part["layers_block_type"] = _BLOCKS
    scaling = part.get("rope_scaling") or part.get("rope_parameters") or {}
    share = scaling.get("partial_rotary_factor", part.get("partial_rotary_factor", 1.0))
    rotary = int(HEAD_DIM * share) // 2
    if "mrope_section" in scaling:
        sections = scaling["mrope_section"]
        others = [n * rotary // sum(sections) for n in sections[1:]]
        scaling["mrope_section"] = [rotary - sum(others), *others]
    if "long_factor" in scaling:
        for key in ("long_factor", "short_factor"):
            scaling[key] = scaling[key][:rotary]


def _shrink_unequal(part: dict[str, Any]) -> None:
    """Gemma 3n and 4: layers of each kind that keep KV, and as many that read it, if any do."""
    part["layer_types"] = part["layer_types"][-_UNEQUAL:] * 2
    if part["num_kv_shared_layers"]:
        part["num_kv_shared_layers"] = _UNEQUAL
    if part.get("hidden_size_per_layer_input"):
        part["hidden_size_per_layer_input"] = _PER_LAYER
    if part.get("num_global_key_value_heads"):  # so that a layer keeps half of what others do
        part["num_key_value_heads"], part["num_global_key_value_heads"] = HEADS, HEADS // 4
    for key in ("intermediate_size", "activation_sparsity_pattern"):
        if isinstance(part.get(key), list):
            part[key] = part[key][:1] + part[key][-1:] * (2 * _UNEQUAL - 1)


def _layers(part: dict[str, Any]) -> int:
    """So many that each kind of layer is there."""
    if "num_kv_shared_layers" in part:
        return 2 * _UNEQUAL
    if "hybrid_override_pattern" in part:
        return len(_PATTERN)
    if "layers_block_type" in part:
        return len(_BLOCKS)
    if "linear_attn_config" in part:
        return 3
    if "full_attention_interval" in part:
        return int(part["full_attention_interval"])
    if part.get("model_type") == "llama4_text":  # the last has no rotary embeddings
        return int(part["no_rope_layers"].index(0)) + 1
    if "layer_types" in part:
        kinds: list[str] = part["layer_types"]
        return max(kinds.index(kind) for kind in set(kinds)) + 1 if len(set(kinds)) > 1 else LAYERS
    pattern = part.get("sliding_window_pattern")
    return pattern if isinstance(pattern, int) else LAYERS


def make_shrunken(folder: Path, name: str, config: dict[str, Any]) -> str:
    """Write one; its path. Its greedy output does not end early by chance."""
    import torch
    import transformers

    small = shrunken(config)
    as_published = json.dumps(small)
    several = not small.keys().isdisjoint(("vision_config", "audio_config"))
    if several:  # its head is its own, unless its language model says otherwise
        small.setdefault("tie_word_embeddings", small["model_type"] in _TIED)
    known = _SAME_AS.get(small["model_type"], small["model_type"])
    kind_of_config = transformers.CONFIG_MAPPING[known]
    # vLLM has the class of DeepSeek V3 say `kimi_k2` once it has read one of these.
    kind_of_config.model_type = known
    made = kind_of_config(**{key: value for key, value in small.items() if key != "model_type"})
    torch.manual_seed(sum(name.encode()))
    kind = getattr(transformers, _CLASSES.get(small["architectures"][0], small["architectures"][0]))
    if known == "gemma3n":  # what reads images needs a library that is not installed
        kind, made = transformers.Gemma3nForCausalLM, made.get_text_config()
    with torch.no_grad():
        model = kind(made)
        for weight, values in model.named_parameters():
            if not any(part in weight for part in _NORMS):
                # A tied head answers a large embedding with its own token, again and again.
                tied = made.tie_word_embeddings and values.shape == (VOCAB, HIDDEN)
                values.normal_(0.0, 0.02 if tied else 0.2 if values.dim() > 1 else 0.05)
        for buffer, values in model.named_buffers():
            if buffer.endswith("layer_scalar"):
                values.fill_(0.9)
    path = folder / name
    model.to(torch.float32).save_pretrained(path)
    # Transformers writes what published files leave out, and another type.
    if several or small["model_type"] in _SAME_AS:
        (path / "config.json").write_text(as_published)
    elif small["architectures"][0] in _CLASSES:
        _write_architectures(path / "config.json", small["architectures"])
    if "MistralLarge3ForCausalLM" in small["architectures"]:
        (path / "config.json").write_text(as_published)
        _name_as_mistral(path / "model.safetensors")
    if known in {"gemma4", "gemma4_text"}:  # so many that a test meets some
        suppressed = list(range(0, VOCAB, NEVER_SAID))
        settings = {"eos_token_id": EOS, "suppress_tokens": suppressed}
        (path / "generation_config.json").write_text(json.dumps(settings))
    if known == "kimi_linear":
        _rename(path / "model.safetensors", "layers.0.block_sparse_moe.", "layers.0.mlp.")
    if small.get("text_config", {}).get("model_type") in TRANSPOSED_EXPERTS:
        _transpose_experts(path / "model.safetensors")
    if "audio_config" in small and "vision_config" not in small:
        _name_as_published(path / "model.safetensors")
    if small["model_type"] == "phi4mm":
        _add_adapters(path / "model.safetensors")
        for code in ("configuration_phi4mm.py", "modeling_phi4mm.py", "processing_phi4mm.py"):
            (path / code).write_text("raise SystemExit(__name__)\n")
    if "num_kv_shared_layers" in small.get("text_config", small):
        _add_published(path / "model.safetensors", small)
    save_tokenizer(path)
    return str(path)


def _name_as_mistral(file: Path) -> None:
    """Without biases of a router, which Mistral's has not."""
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, tensor in load_file(file).items():
        for pattern, replacement in _MISTRAL:
            name = re.sub(pattern, replacement, name)
        if not name.endswith("e_score_correction_bias"):
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


def _name_as_published(file: Path) -> None:
    """Transformers writes names with one part more by now."""
    from safetensors.torch import load_file, save_file

    old, new = "language_model.model.model.", "language_model.model."
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _add_adapters(file: Path) -> None:
    """What published files of Phi-4-multimodal have: adapters for images and for sound next to each
    linear layer, what reads these, and no head."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, tensor in load_file(file).items():
        layer, is_linear, _ = name.partition("_proj.weight")
        if not is_linear:
            tensors[name] = tensor
            continue
        tensors[f"{layer}_proj.base_layer.weight"] = tensor
        for what in ("vision", "speech"):
            rows, columns = tensor.shape
            tensors[f"{layer}_proj.lora_A.{what}.weight"] = torch.full((8, columns), 9.0)
            tensors[f"{layer}_proj.lora_B.{what}.weight"] = torch.full((rows, 8), 9.0)
    extended = "model.embed_tokens_extend"
    for part in ("image_embed.img_projection.0", "audio_embed.audio_projection.speech.0"):
        tensors[f"{extended}.{part}.weight"] = torch.ones(VOCAB, HIDDEN)
    save_file(tensors, file, metadata={"format": "pt"})


def _write_architectures(file: Path, architectures: list[str]) -> None:
    written = json.loads(file.read_text()) | {"architectures": architectures}
    file.write_text(json.dumps(written))


def _add_published(file: Path, small: dict[str, Any]) -> None:
    """What published files of Gemma 3n and 4 have, and transformers does not write: keys and values
    of layers that read those of others, which no model computes, and what Gemma 3n reads images and
    hears with."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    text = small.get("text_config", small)
    layers, shared = text["num_hidden_layers"], text["num_kv_shared_layers"]
    for layer in range(layers - shared, layers):
        for part in ("k_proj", "v_proj", "k_norm") if shared else ():
            like = next(name for name in tensors if f".0.self_attn.{part}." in name)
            name = like.replace(".0.self_attn", f".{layer}.self_attn")
            tensors[name] = torch.full_like(tensors[like], 9.0)
    if small["model_type"] == "gemma3n":
        tensors = {
            name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()
        }
        for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"):
            tensors[f"model.{part}.weight"] = torch.ones(VOCAB, HIDDEN)
    save_file(tensors, file, metadata={"format": "pt"})


def _rename(file: Path, old: str, new: str) -> None:
    """Give tensors the names of published files, where transformers writes others."""
    from safetensors.torch import load_file, save_file

    tensors = {name.replace(old, new): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _transpose_experts(file: Path) -> None:
    """As published files have them; transformers writes them otherwise by now."""
    from safetensors.torch import load_file, save_file

    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
