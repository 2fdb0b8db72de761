"""A small Voxtral as Mistral publishes it: transformers' files, and Mistral's own beside them, of
the same weights; and the tokenizer that both have."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any, Final

from tests.configs import CONFIGS
from tests.engine.shrunken import HEADS, VOCAB, make_shrunken

VOXTRAL: Final = "voxtral-mini-3b-2507"
SPECIAL: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[AUDIO]", "[BEGIN_AUDIO]"),
    "[TRANSCRIBE]",
)
"""Those of the published tokenizer that mean something, in their order."""
AUDIO: Final = SPECIAL.index("[AUDIO]")
BEGIN_AUDIO: Final = SPECIAL.index("[BEGIN_AUDIO]")
FIRST_WORD: Final = 40
"""The token of byte 0, behind those that are special."""
TOKENS: Final = 375
"""Of a sound of up to 30 seconds."""
HEARD: Final = (BEGIN_AUDIO, *[AUDIO] * TOKENS)
"""What mistral_common writes for a sound."""
SOUND: Final[dict[str, Any]] = {
    "sampling_rate": 16_000,
    "frame_rate": 12.5,
    "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
    "chunk_length_s": 30.0,
}
"""What the published tokenizer says of sounds."""

_LANGUAGE: Final = (
    (r"^language_model\.model\.", ""),
    (r"^embed_tokens\.", "mm_whisper_embeddings.tok_embeddings."),
    (r"^language_model\.lm_head\.", "output."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.([qkvo])_proj\.", r".attention.w\1."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
)
_ENCODER: Final = (
    (r"^audio_tower\.conv([12])\.", lambda found: f"conv_layers.{int(found[1]) - 1}."),
    (r"^audio_tower\.layers\.", "transformer.layers."),
    (r"^audio_tower\.layer_norm\.", "transformer.norm."),
    (r"\.self_attn\.([qkv])_proj\.", r".attention.w\1."),
    (r"\.self_attn\.out_proj\.", ".attention.wo."),
    (r"\.self_attn_layer_norm\.", ".attention_norm."),
    (r"\.final_layer_norm\.", ".ffn_norm."),
    (r"\.fc([12])\.", r".feed_forward.w\1."),
)
_PROJECTOR: Final = {"linear_1": 0, "linear_2": 2}


def write_tekken(path: Path, sound: dict[str, Any] | None = SOUND) -> None:
    """Write the tokenizer, with what it says of sounds, if it says anything."""
    pairs = (bytes([one, other]) for one in range(ord("a"), ord("z")) for other in range(32, 127))
    words = [*(bytes([byte]) for byte in range(256)), *pairs][: VOCAB - FIRST_WORD]
    described = {
        "config": {
            "pattern": r"\w+|[^\w\s]+|\s+",
            "num_vocab_tokens": len(words),
            "default_vocab_size": VOCAB,
            "default_num_special_tokens": FIRST_WORD,
            "version": "v13",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for rank, word in enumerate(words)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": word, "is_control": True}
            for rank, word in enumerate(SPECIAL)
        ],
    }
    if sound is not None:
        described["audio"] = sound
    (path / "tekken.json").write_text(json.dumps(described), encoding="utf-8")


def make_voxtral(folder: Path) -> str:
    """Write the small checkpoint, of float32; its path. Plain vLLM takes Mistral's files of it."""
    path = Path(make_shrunken(folder, VOXTRAL, CONFIGS[VOXTRAL] | {"audio_token_id": AUDIO}))
    for file in path.glob("tokenizer*"):
        file.unlink()
    write_tekken(path)
    config = json.loads((path / "config.json").read_text())
    file = path / "model.safetensors"
    _index(path, file)
    _save_as_mistral(file, path / "consolidated.safetensors", config)
    (path / "params.json").write_text(json.dumps(params(config)), encoding="utf-8")
    return str(path)


def params(config: dict[str, Any]) -> dict[str, Any]:
    """Mistral's configuration of the model that transformers' describes."""
    text, sound = config["text_config"], config["audio_config"]
    return {
        "dim": text["hidden_size"],
        "n_layers": text["num_hidden_layers"],
        "head_dim": text["head_dim"],
        "hidden_dim": text["intermediate_size"],
        "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"],
        "rope_theta": text["rope_theta"],
        "norm_eps": text["rms_norm_eps"],
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text["max_position_embeddings"],
        "multimodal": {
            "whisper_model_args": {
                "encoder_args": {
                    "audio_encoding_args": {
                        "sampling_rate": 16_000,
                        "num_mel_bins": sound["num_mel_bins"],
                        "hop_length": 160,
                        "window_size": 400,
                    },
                    "dim": sound["hidden_size"],
                    "n_layers": sound["num_hidden_layers"],
                    "head_dim": sound["head_dim"],
                    "hidden_dim": sound["intermediate_size"],
                    "n_heads": sound["num_attention_heads"],
                    "vocab_size": sound["vocab_size"],
                    "max_source_positions": sound["max_source_positions"],
                },
                "downsample_args": {"downsample_factor": 4},
            }
        },
    }


def _index(path: Path, file: Path) -> None:
    """Name the file of transformers in an index, as the published repository does."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        names = dict.fromkeys(opened.keys(), file.name)
    written = {"metadata": {}, "weight_map": names}
    (path / "model.safetensors.index.json").write_text(json.dumps(written), encoding="utf-8")


def _save_as_mistral(file: Path, other: Path, config: dict[str, Any]) -> None:
    """Write the tensors under the names that Mistral has for them, and in its order of the rows
    that rotary embeddings turn."""
    from safetensors.torch import load_file, save_file

    text = config["text_config"]
    tensors = {}
    for name, tensor in load_file(file).items():
        if name.startswith("language_model."):
            heads = {"q": HEADS, "k": text["num_key_value_heads"]}
            if found := re.search(r"self_attn\.([qk])_proj", name):
                width = tensor.shape[1]
                halves = tensor.view(heads[found[1]], 2, -1, width)
                tensor = halves.transpose(1, 2).reshape(tensor.shape).contiguous()
            tensors[_renamed(name, _LANGUAGE)] = tensor
        elif found := re.fullmatch(r"multi_modal_projector\.(\w+)\.weight", name):
            number = _PROJECTOR[found[1]]
            tensors[f"mm_whisper_embeddings.audio_language_projection.{number}.weight"] = tensor
        elif name != "audio_tower.embed_positions.weight":  # which are computed
            own = _renamed(name, _ENCODER)
            tensors[f"mm_whisper_embeddings.whisper_encoder.{own}"] = tensor
    save_file(tensors, other, metadata={"format": "pt"})


def _renamed(name: str, rules: tuple[tuple[str, Any], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
