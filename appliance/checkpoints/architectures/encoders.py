"""What a ``config.json`` may say of encoders with rotary embeddings: Nomic's, GTE as it was before
ModernBERT, and Jina's embeddings v3.

Published files come with code of their own, which is never run, and which computes some settings
that vLLM's layers do not know, or take for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from appliance.checkpoints.architectures import task_adapters
from appliance.checkpoints.model_config import ModelConfig

GTE: Final = frozenset({"GteModel", "GteNewForSequenceClassification", "GteNewModel"})
NOMIC: Final = "NomicBertModel"
JINA: Final = "XLMRobertaModel"
"""With rotary embeddings; most models of this architecture have absolute positions."""
ROTARY: Final = "rotary"
"""How Jina's files say it (`position_embedding_type`)."""

_Settings = Mapping[str, tuple[Any, ...]]
"""By key, the values that are computed; None among them if a file may leave the key out."""

_GTE: Final[_Settings] = {
    "hidden_act": ("gelu", None),
    "layer_norm_type": ("layer_norm", None),
    "logn_attention_scale": (False, None),
    "pack_qkv": (True, None),
    "position_embedding_type": ("rope",),
}
_NOMIC: Final[_Settings] = {
    "activation_function": ("swiglu", "gelu"),
    "causal": (False, None),
    "num_heads_kv": (None,),
    "parallel_block": (False, None),
    "position_embedding_type": ("rope", None),
    "prenorm": (False,),
    "rotary_emb_dim": (None,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "rope_parameters": (None,),
    "rope_scaling": (None,),
    "use_rms_norm": (False, None),
}
_NOMIC_EXPERTS: Final[_Settings] = {
    "activation_function": ("gelu",),
    "expert_choice_router": (False, None),
    "moe_normalize_expert_weights": (False, None),
    "num_shared_experts": (0, None),
}
_JINA: Final[_Settings] = {
    "hidden_act": ("gelu", None),
    "load_trained_adapters": (True,),
    "rope_parameters": (None,),
    "rope_scaling": (None,),
    "rotary_emb_dim": (None,),
    "rotary_emb_fraction": (1.0, None),
    "rotary_emb_interleaved": (False, None),
    "rotary_emb_scale_base": (None,),
    "truncate_dim": (None,),
}
_TWO_TEXTS: Final[_Settings] = {"type_vocab_size": (0, 1)}
"""vLLM does not give the second text of a pair another type."""
_NEEDED: Final = (
    "activation_function",
    "layer_norm_epsilon",
    "mlp_fc1_bias",
    "mlp_fc2_bias",
    "n_embd",
    "n_head",
    "n_inner",
    "n_layer",
    "qkv_proj_bias",
    "rotary_emb_base",
    "rotary_emb_scale_base",
)
"""What vLLM reads from Nomic's files; transformers writes these under other names by now."""
_NEEDED_OF_EXPERTS: Final = ("moe_top_k", "num_experts")
_NEEDED_OF_GTE: Final = ("max_position_embeddings", "rope_theta")
"""What transformers would take defaults of its own for. The second may be in `rope_parameters`."""
_NEEDED_OF_JINA: Final = ("max_position_embeddings", "rotary_emb_base", task_adapters.KEY)
_NUMBERS: Final = frozenset(
    {
        *("n_embd", "n_head", "n_inner", "n_layer"),
        *("rotary_emb_base", *_NEEDED_OF_EXPERTS, *_NEEDED_OF_GTE),
    }
)
"""Keys that are never null: for `n_inner`, the published code would then take a multiple of the
hidden size."""
_BASES: Final = frozenset({"rope_theta", "rotary_emb_base"})
"""Of rotary embeddings: these may have decimals."""


def why_not(config: ModelConfig) -> str:
    """What such a file says that is not computed; empty for what is, and for other models."""
    name = config.architecture
    if config.get(task_adapters.KEY) and not is_jina(config):
        return f"{name} has adapters of tasks: only {JINA} with {ROTARY} embeddings is served so"
    if is_jina(config):
        wrong = _missing(config, _NEEDED_OF_JINA) or _other(config, _JINA)
        return wrong or task_adapters.why_not(config)
    if name in GTE:
        pairs = _TWO_TEXTS if name.endswith("ForSequenceClassification") else {}
        return (
            _missing(config, _NEEDED_OF_GTE) or _other(config, {**_GTE, **pairs}) or _scaled(config)
        )
    if name != NOMIC:
        return ""
    experts = _has_experts(config)
    if wrong := _missing(config, (*_NEEDED, *(_NEEDED_OF_EXPERTS if experts else ()))):
        return wrong
    biases = [config.get(key) for key in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")]
    if len(set(biases)) > 1:
        return f"some layers of {name} have biases, and others have none"
    return _other(config, {**_NOMIC, **(_NOMIC_EXPERTS if experts else {})})


def is_jina(config: ModelConfig) -> bool:
    """Whether it is one of Jina's encoders with rotary embeddings."""
    return config.architecture == JINA and config.get("position_embedding_type") == ROTARY


def _missing(config: ModelConfig, needed: Sequence[str]) -> str:
    """What the file itself does not say."""
    rope = config.whole.get("rope_parameters")
    said = {**(rope if isinstance(rope, dict) else {}), **config.whole}
    for key in needed:
        if key not in said:
            return f"it does not say {key}, which vLLM needs"
        value = said[key]
        kinds = (int, float) if key in _BASES else (int,)
        if key in _NUMBERS and (type(value) not in kinds or value <= 0):
            kind = "number" if float in kinds else "integer"
            return f"{key} of {config.architecture} is {value!r}, not a positive {kind}"
    return ""


def _has_experts(config: ModelConfig) -> bool:
    """Whether layers of one of Nomic's encoders have experts."""
    return bool(config.get("moe_every_n_layers"))


def _other(config: ModelConfig, settings: _Settings) -> str:
    for key, served in settings.items():
        if (value := config.get(key)) not in served:
            said = " or ".join(repr(one) for one in served if one is not None) or "null"
            found = "left out" if value is None else repr(value)
            return f"{key} of {config.architecture} is {found}: only {said} is served"
    return ""


def _scaled(config: ModelConfig) -> str:
    """The same for rotary embeddings, which may be scaled once for all lengths."""
    said = config.first("rope_parameters", "rope_scaling")
    if said is None:
        return ""
    values = said if isinstance(said, dict) else {}
    kind, factor = values.get("rope_type", values.get("type")), values.get("factor")
    if kind == "default" or (kind == "ntk" and _is_factor(factor) and "mixed_b" not in values):
        return ""
    return (
        f"rotary embeddings of {config.architecture} are scaled by {said!r}: only by ntk, with a "
        "factor, are they served"
    )


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 1
