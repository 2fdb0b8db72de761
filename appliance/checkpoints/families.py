"""Which kinds of model are served here, by what their ``config.json`` says of them.

vLLM knows many architectures. What is served keeps, in each layer, keys and values of one size or a
state of one size, and looks back only; or it attends in both directions, keeps nothing, and embeds
or scores. It reads text, or it makes text of sound that an encoder has read; and it has weights in
the type it is computed in, or quantized ones (`appliance.checkpoints.quantized`). The families that
tests build, and compare with plain vLLM, are in `TRIED`, `ENCODERS`, `MEDIA` and `TRANSCRIBERS`
(docs/models.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from appliance.checkpoints.architectures import encoders, mimo, mistral_large
from appliance.checkpoints.architectures.chat_sounds import read_besides_text
from appliance.checkpoints.architectures.required_keys import what_lacks
from appliance.checkpoints.architectures.transcribers import TRANSCRIBERS, why_not_served
from appliance.checkpoints.architectures.unequal_layers import TWO_SIZES, UNEQUAL
from appliance.checkpoints.language_models import MEDIA, served_architecture
from appliance.checkpoints.model_config import ANOTHER, ONE_RANK, ModelConfig, known_models
from appliance.checkpoints.quantized import quantization
from appliance.checkpoints.rank_shares import why_undivided
from appliance.checkpoints.task import POOLING_ENDINGS
from appliance.checkpoints.windows import CHUNK_MULTIPLE, CHUNKED
from appliance.errors import RemediedCheckpointError
from appliance.platform import torchvision
from appliance.platform.cpus import computes_four_bits, computes_linear_attention

TRIED: Final = frozenset(
    {
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "BloomForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "CwmForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneMoEForCausalLM",
        "FalconForCausalLM",
        "FalconH1ForCausalLM",
        "FlexOlmoForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTJForCausalLM",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3nForCausalLM",
        "Gemma4ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "Jais2ForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "LlamaForCausalLM",
        "Mamba2ForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiniCPM3ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MistralForCausalLM",
        "MistralLarge3ForCausalLM",
        "MixtralForCausalLM",
        "NemotronForCausalLM",
        "NemotronHForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "PhiMoEForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
        "Zamba2ForCausalLM",
    }
)
"""Architectures that `tests/engine/test_families.py` serves."""

ENCODERS: Final = frozenset(
    {
        "BertForSequenceClassification",
        "BertModel",
        "Gemma3TextModel",
        "GteModel",
        "GteNewForSequenceClassification",
        "GteNewModel",
        "ModernBertForSequenceClassification",
        "ModernBertModel",
        "NomicBertModel",
        "RobertaForSequenceClassification",
        "RobertaModel",
        "XLMRobertaForSequenceClassification",
        "XLMRobertaModel",
    }
)
"""Architectures whose tokens attend in both directions, served in `tests/engine/test_encoders.py`:
a prompt is computed in one step, and nothing of it is kept."""

_REWARDER: Final = "Qwen2ForRewardModel"
"""It is served in `tests/engine/test_pooling.py`."""

_MAMBA_1: Final = "Mamba 1 (selective_scan_fwd)"
NO_CPU_KERNEL: Final[Mapping[str, str]] = {
    "FalconMambaForCausalLM": _MAMBA_1,
    "JambaForCausalLM": _MAMBA_1,
    "JambaForSequenceClassification": _MAMBA_1,
    "KimiLinearForCausalLM": "Kimi Delta Attention (its kernels are Triton's)",
    "MambaForCausalLM": _MAMBA_1,
}
"""What vLLM's build for CPUs cannot compute, by the architecture that needs it."""

BF16: Final = "take the model's checkpoint with weights in bfloat16 or float16"
INTEGERS: Final = f"{BF16}, or in integers of 4 or 8 bits that docs/models.md lists"
EIGHT_BITS: Final = f"{BF16}, or in 8 bits (W8A8 or fp8) that docs/models.md lists"
TEXT: Final = "take a checkpoint of a model that reads text only"


class UnsupportedModel(RemediedCheckpointError):
    """A model of a kind that is not served here, and what to do instead."""


def base_architecture(architecture: str) -> str | None:
    """The architecture that vLLM builds for one with this name: pooling models are those that
    generate, without their heads. None if vLLM has none."""
    known = known_models()
    if architecture in known.architectures:
        return architecture
    ending = next((end for end in known.endings if architecture.endswith(end)), None)
    if ending is None:
        return None
    stem = architecture.removesuffix(ending)
    return next((stem + end for end in known.endings if stem + end in known.architectures), None)


def check_family(config: ModelConfig) -> None:
    """Raise `UnsupportedModel` for a kind of model that is not served here."""
    for find in _CHECKS:
        if found := find(config):
            wrong, remedy = found
            raise UnsupportedModel(f"{config.path}: {wrong}", remedy)


def check_cpu(config: ModelConfig, dtype: str, ranks: int = 1) -> None:
    """Raise `UnsupportedModel` for a kind of model that is served on GPUs only; its numbers are of
    type `dtype`, and `ranks` have a shard of it each."""
    _check_libraries(config)
    _check_cpu_weights(config, dtype, ranks)
    name = served_architecture(config)
    if config.model_type in UNEQUAL and ranks > 1:
        raise UnsupportedModel(
            f"{config.path}: layers of {name} differ in the KV that they keep, which was not tried "
            "on several ranks",
            ONE_RANK,
        )
    _check_ranks(config, ranks)
    _check_cpu_kernels(config, name)
    if not config.get("linear_key_head_dim"):
        return
    if not computes_linear_attention():
        raise UnsupportedModel(
            f"{config.path}: this CPU lacks the instructions (avx512_bf16) for linear attention",
            ANOTHER,
        )
    if dtype != "bfloat16":
        raise UnsupportedModel(
            f"{config.path}: linear attention is computed in bfloat16 on the CPU, not {dtype}",
            'take dtype = "bfloat16"',
        )


def _check_cpu_weights(config: ModelConfig, dtype: str, ranks: int) -> None:
    """Raise `UnsupportedModel` for quantized weights that are computed in no such way."""
    found = quantization.said(config)
    method = quantization.method_of(found) if found is not None else ""
    if quantization.has_four_bits(config) and not computes_four_bits():
        raise UnsupportedModel(
            f"{config.path}: this CPU lacks the instructions (avx512f, avx512bw, avx512dq, "
            f"avx512vl) for weights in 4 bits ({method})",
            EIGHT_BITS,
        )
    if quantization.quantization(config) is not None and dtype == "float32":
        raise UnsupportedModel(
            f"{config.path}: quantized weights ({method}) are computed in bfloat16 or float16, not "
            f"{dtype}",
            'take dtype = "bfloat16"',
        )
    if found is not None and ranks > 1:
        raise UnsupportedModel(
            f"{config.path}: quantized weights ({method}) are not served by several ranks yet",
            ONE_RANK,
        )


def _check_cpu_kernels(config: ModelConfig, name: str) -> None:
    """Raise `UnsupportedModel` for layers that vLLM, or a test, does not compute on CPUs."""
    limits = config.get("swiglu_limits")  # Step 3.5
    if isinstance(limits, list) and any(limits):
        raise UnsupportedModel(
            f"{config.path}: {name} bounds what its experts compute (swiglu_limits), for which "
            "vLLM has no kernel on CPUs",
            ANOTHER,
        )
    base = base_architecture(name) or ""
    if lacking := NO_CPU_KERNEL.get(base):
        raise UnsupportedModel(
            f"{config.path}: vLLM has no kernel on CPUs for {lacking}, which {name} needs", ANOTHER
        )
    if keeps_state(config) and TRIED.isdisjoint((name, base)):
        raise UnsupportedModel(
            f"{config.path}: layers of {name} keep a state, which no test computes on the CPU",
            ANOTHER,
        )


def check_cuda(config: ModelConfig, ranks: int = 1) -> None:
    """Raise `UnsupportedModel` for a kind of model that is served on the CPU only, or not where
    `ranks` have a shard of it each."""
    _check_libraries(config)
    if wrong := why_not_served(config, cuda=True):
        raise UnsupportedModel(f"{config.path}: {wrong}", ANOTHER)
    _check_ranks(config, ranks)
    found = quantization.said(config)
    if found is not None:
        method = quantization.method_of(found)
        raise UnsupportedModel(
            f"{config.path}: its weights are quantized ({method}), which was only tried on the CPU",
            BF16,
        )
    if config.model_type in UNEQUAL:
        raise UnsupportedModel(
            f"{config.path}: layers of {config.architecture} differ in the KV that they keep, "
            "which was only tried on the CPU",
            ANOTHER,
        )


def _check_ranks(config: ModelConfig, ranks: int) -> None:
    """Raise `UnsupportedModel` for a model of which so many ranks cannot have a shard each."""
    if wrong := why_not_served(config, ranks=ranks):
        raise UnsupportedModel(f"{config.path}: {wrong}", ONE_RANK)
    if wrong := why_undivided(config, ranks):
        raise UnsupportedModel(
            f"{config.path}: {wrong}",
            "take a tensor_parallel that divides it, in [devices] or in the groups of the model",
        )


def _check_libraries(config: ModelConfig) -> None:
    """Raise `UnsupportedModel` if the environment lacks what vLLM imports with the model's code."""
    name = served_architecture(config)
    if "torchvision" in _known_traits(name) and not torchvision.is_there():
        raise UnsupportedModel(
            f"{config.path}: torchvision is not there, which vLLM imports for {name}",
            "run `make install`",
        )


def _known_traits(architecture: str) -> tuple[str, ...]:
    """See `KnownModels.architectures`."""
    return known_models().architectures.get(base_architecture(architecture) or "", ())


def keeps_state(config: ModelConfig) -> bool:
    """Whether layers keep a state of constant size, such as Mamba's, instead of keys and values."""
    return "state" in _known_traits(served_architecture(config))


def is_tried(config: ModelConfig) -> bool:
    """Whether tests serve this architecture. What is tried of one that generates holds for those
    that pool what it computes."""
    base = base_architecture(config.architecture) or ""
    return base in {_REWARDER, *ENCODERS, *MEDIA, *TRANSCRIBERS} or not TRIED.isdisjoint(
        (base, base.removesuffix("Model") + "ForCausalLM")
    )


_Found = tuple[str, str] | None
"""What is wrong, and the remedy."""


def _not_served(config: ModelConfig) -> _Found:
    name = config.architecture
    reason = _NOT_SERVED.get(base_architecture(name) or name)
    return (f"{name} {reason}", ANOTHER) if reason else None


def _quantized(config: ModelConfig) -> _Found:
    if reason := quantization.why_not(config):
        return f"{reason}, which is not supported yet", INTEGERS
    found = quantization.said(config)
    name = config.architecture
    if found is not None and served_architecture(config) not in quantization.tried(config):
        method = quantization.method_of(found)
        return f"no test serves {name} with weights that are quantized ({method})", BF16
    return None


def _unknown(config: ModelConfig) -> _Found:
    name, known = config.architecture, known_models()
    if last := known.removed.get(name):
        return f"vLLM has no architecture {name} any more: {last} was the last one with it", ANOTHER
    if config.model_type not in known.types:
        named = f"model_type {config.model_type!r}" if config.model_type else "no model_type"
        return (
            f"config.json has {named}, so that it can only be read with code that comes with the "
            "checkpoint, which is never run",
            ANOTHER,
        )
    if base_architecture(name) is None:
        return f"vLLM has no architecture {name} of its own", ANOTHER
    return None


def _traits(config: ModelConfig) -> _Found:
    name = config.architecture
    traits = _known_traits(name)
    if "libraries" in traits:
        return f"vLLM needs libraries for {name} that are not installed", ANOTHER
    if name in TRANSCRIBERS:
        return None
    if "media" in traits and name not in MEDIA:
        return _why_no_media(name, traits), TEXT
    if "torchvision" in traits and name not in TRIED:
        return f"vLLM needs torchvision for {name}, which no test serves", ANOTHER
    if not served_architecture(config):
        return (
            f"{name} reads {read_besides_text(name)}, and no test serves its text with a language "
            f"model of type {config.model_type}",
            TEXT,
        )
    if not config.is_encoder:
        return None
    if name not in ENCODERS:
        return (
            f"{name} attends in both directions: of such models only {', '.join(sorted(ENCODERS))} "
            "are served",
            ANOTHER,
        )
    return _settings(config)


def _settings(config: ModelConfig) -> _Found:
    """Of an encoder."""
    name = config.architecture
    if wrong := encoders.why_not(config):
        return wrong, ANOTHER
    if name == encoders.NOMIC or name in encoders.GTE or encoders.is_jina(config):
        return None  # they have rotary ones
    positions = config.get("position_embedding_type")
    if positions is None and name == "XLMRobertaModel":
        return (
            "it does not say position_embedding_type, which vLLM needs",
            'add "position_embedding_type": "absolute"',
        )
    if positions not in (None, "absolute"):
        return f"positions of {name} are {positions}: only absolute ones are served", ANOTHER
    return None


def _why_no_media(architecture: str, traits: Collection[str]) -> str:
    """Why a model is refused that reads something besides text."""
    read = " and ".join(kind for kind in ("images", "sound") if kind in traits) or "images or sound"
    if "cross" in traits:
        return (
            f"{architecture} attends to what an encoder makes of {read} (cross attention): of such "
            f"models only {', '.join(sorted(TRANSCRIBERS))} is served"
        )
    return f"{architecture} reads {read}, which is not supported yet; no test serves its text"


def _pools(config: ModelConfig) -> _Found:
    """Those that neither generate, embed nor score in a usual way: their names say so."""
    name = config.architecture
    traits = _known_traits(name)
    if "pooling" in traits and not name.endswith(POOLING_ENDINGS):
        return f"{name} pools prompts in a way that is not computed here", ANOTHER
    return None


def _sparse(config: ModelConfig) -> _Found:
    if not config.get("index_topk") and config.model_type not in _SPARSE:
        return None
    return (
        f"{config.architecture} chooses which tokens to read (sparse MLA), which is not supported "
        f"yet; on CPUs, {_SPARSE.get(config.model_type, _NO_SPARSE)}",
        ANOTHER,
    )


def _unequal(config: ModelConfig) -> _Found:
    name = config.architecture
    known = known_models().types.get(config.model_type)
    chunk = config.get("attention_chunk_size")
    if chunk and config.model_type not in CHUNKED:
        return f"{name} attends to chunks of its context, which is not supported yet", ANOTHER
    if chunk and (not isinstance(chunk, int) or chunk % CHUNK_MULTIPLE):
        wrong = f"attention_chunk_size is {chunk!r}, which is no multiple of {CHUNK_MULTIPLE}"
        return wrong, ANOTHER
    if known is not None and known.unequal and config.model_type not in TWO_SIZES:
        return f"{name} has layers whose keys and values have different sizes", ANOTHER
    return None


_SHARDS: Final = "stores queries, keys and values in shards, which no test serves"
_TWICE: Final = "attends twice in each layer, and what requests keep there is not counted yet"
_NOT_SERVED: Final = {
    "DbrxForCausalLM": "has experts that vLLM 0.32 does not load",
    "LongcatFlashForCausalLM": _TWICE,
    "LongcatFlashNgramForCausalLM": _TWICE,
    "MiMoV2ForCausalLM": _SHARDS,
}
"""By architecture, what its layers do that is not served here or by vLLM."""
_NO_SPARSE: Final = "vLLM has no such attention"
_NO_TRITON: Final = "vLLM needs Triton for it, which its build for CPUs lacks"
_SPARSE: Final[Mapping[str, str]] = {
    "deepseek_v32": _NO_SPARSE,
    "deepseek_v4": _NO_TRITON,
    "deepseek_v41": _NO_SPARSE,
    "glm_moe_dsa": _NO_SPARSE,
}
"""Types of which each file says `index_topk`, or should, and what vLLM lacks for them on CPUs."""

_CHECKS: Final[tuple[Callable[[ModelConfig], _Found], ...]] = (
    _not_served,
    _sparse,
    _quantized,
    _unknown,
    _traits,
    _pools,
    _unequal,
    what_lacks,
    mistral_large.what_lacks,
    mimo.what_lacks,
)
