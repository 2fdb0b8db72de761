"""Writes what vLLM and transformers know of models: `appliance/checkpoints/known_models.json`.

    python -m appliance.frontend.known_models > appliance/checkpoints/known_models.json

The daemon has neither of them, and has to say of a checkpoint whether it can be served.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from importlib.util import find_spec
from inspect import getsource, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

TORCHVISION: Final = "torchvision"
KEYS: Final = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_kv_shared_layers",
    "tie_word_embeddings",
)
"""Of a ``config.json``, those that the daemon reads."""
_ALIASES: Final = {
    "hidden_size": ("n_embed", "n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len", "model_max_length"),
}
_IN_FILES: Final = {
    "nomic_bert": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }
}
"""By type, names in published files that vLLM reads, though transformers has newer ones."""
_PROBE: Final = 96
"""A value that no default has."""


def known_models() -> dict[str, Any]:
    """See `appliance.checkpoints.model_config.KnownModels`."""
    from vllm.config.model import iter_architecture_defaults
    from vllm.model_executor.models.registry import (
        _PREVIOUSLY_SUPPORTED_MODELS,
        ModelRegistry,
    )

    endings = [ending for ending, _ in iter_architecture_defaults()]
    traits = {name: known_traits(name) for name in sorted(ModelRegistry.models)}
    unread = [name for name, found in traits.items() if found == ["media"]]
    with_it = [name for name, found in traits.items() if TORCHVISION in found]
    # What transformers says of the library once, it says always: hence another process.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _begin_with_torchvision) as process:
        for name, found in zip(with_it, process.map(known_traits, with_it), strict=True):
            traits[name] = [TORCHVISION, *found]
        traits |= zip(unread, process.map(known_traits, unread), strict=True)
    return {
        "endings": endings,
        "architectures": traits,
        "removed": dict(sorted(_PREVIOUSLY_SUPPORTED_MODELS.items())),
        "types": dict(_types()),
        "parsers": known_parsers(),
    }


def known_parsers() -> dict[str, list[str]]:
    """The names of vLLM's parsers, as its registries have them."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    return {
        "tool_parser": sorted(ToolParserManager.list_registered()),
        "reasoning_parser": sorted(ReasoningParserManager.list_registered()),
    }


def _begin_with_torchvision() -> None:
    from appliance.engines.vllm.images.libraries import provide_torchvision

    if not provide_torchvision():
        raise RuntimeError("torchvision is not there: run `make install`")


def known_traits(architecture: str) -> list[str]:
    """What is special about one of vLLM's: see `KnownModels.architectures`."""
    from vllm.model_executor.models import registry

    if architecture in registry._MULTIMODAL_MODELS:
        return _media(architecture)  # not all of these can be imported: some need libraries
    try:
        model = registry.ModelRegistry.models[architecture].load_model_cls()
    except ImportError as error:
        return [TORCHVISION if error.name == TORCHVISION else "libraries"]
    info = registry._ModelInfo.from_model_cls(model)
    found = {
        "pooling": not info.is_text_generation_model,
        "state": info.has_inner_state or info.is_attention_free or info.is_hybrid,
    }
    media = info.supports_multimodal or info.supports_transcription
    return [name for name, has in found.items() if has] + (_media(architecture) if media else [])


def _media(architecture: str) -> list[str]:
    """Of one that reads images or sound: which of them, as far as its source says so."""
    from vllm.model_executor.models.registry import ModelRegistry

    model: Any = ModelRegistry.models[architecture]
    module = _module_source(model.module_name)
    try:
        limits = _limits_source(model.load_model_cls()._processor_factory.info)
    except (ImportError, AttributeError):
        limits = module
    parts = _parts_of_processor(architecture) if "_get_supported_modalities" in limits else ()
    images = ('"image"', '"video"', '"vision_chunk"')
    found = {
        "images": any(word in limits for word in images) or "image_processor" in parts,
        "sound": '"audio"' in limits or not _HEARING.isdisjoint(parts),
        "cross": "EncDecMultiModalProcessor" in module,
    }
    return ["media", *(name for name, has in found.items() if has)]


_HEARING: Final = frozenset({"audio_processor", "feature_extractor"})
"""What vLLM takes for a reader of sound among the parts of a processor of transformers."""


def _module_source(name: str) -> str:
    """Of a module, or of all those in a package."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin)
    files = sorted(file.parent.rglob("*.py")) if spec.submodule_search_locations else [file]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def _limits_source(info: type[Any]) -> str:
    """Of the functions that say how many of each kind a prompt may have: one may add to that of the
    class below it."""
    functions = (vars(base).get("get_supported_mm_limits") for base in info.__mro__)
    return "".join(getsource(found) for found in functions if found is not None)


def _parts_of_processor(architecture: str) -> Collection[str]:
    """Of transformers, which knows what such a model reads if vLLM has no code of its own."""
    import transformers

    name = architecture.removesuffix("ForConditionalGeneration") + "Processor"
    processor = getattr(transformers, name, None)
    return () if processor is None else signature(processor.__init__).parameters


def _types() -> list[tuple[str, dict[str, Any]]]:
    from transformers import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    from appliance.engines.vllm.configs.types import register_types

    register_types()
    makers: dict[str, Callable[[], type[Any]]] = {}
    for registry in (CONFIG_MAPPING, _CONFIG_REGISTRY):
        makers |= {name: lambda r=registry, n=name: r[n] for name in registry}  # type: ignore[misc]
    return [(name, known_type(makers[name]())) for name in sorted(makers)]


def known_type(config: type[Any]) -> dict[str, Any]:
    """Of a type of configuration of transformers: see `ModelType`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    from appliance.engines.vllm.configs.new import NewConfig

    names, in_files = _names(config), _IN_FILES.get(config.model_type, {})
    defaults = _defaults(config, names)
    found: dict[str, Any] = {
        "names": names | in_files,
        "defaults": {key: value for key, value in defaults.items() if key not in in_files},
        "encoder": config.model_type in (*MODEL_FOR_MASKED_LM_MAPPING_NAMES, NewConfig.model_type),
        "mla": _is_mla(config.model_type),
        "unequal": _is_unequal(config),
    }
    text = (getattr(config, "sub_configs", None) or {}).get("text_config")
    if (model_type := getattr(text, "model_type", "")) not in ("", config.model_type):
        found["text"] = model_type
    return {name: value for name, value in found.items() if value}


def _names(config: type[Any]) -> dict[str, str]:
    """Other names for `KEYS`: those of its table, and those that it takes without saying so."""
    renamed: Mapping[str, str] = getattr(config, "attribute_map", {})
    names = {key: renamed[key] for key in KEYS if key in renamed}
    for key, others in _ALIASES.items():
        for other in others:
            made = _made(config, **{other: _PROBE})
            if key not in names and made is not None and vars(made).get(key) == _PROBE:
                names[key] = other
    return names


def _is_mla(model_type: str) -> bool:
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    drafted = SimpleNamespace(model_type="")
    text = SimpleNamespace(model_type=model_type, kv_lora_rank=1, model=drafted)
    asked: Any = SimpleNamespace(hf_text_config=text)
    return bool(ModelArchConfigConvertorBase.is_deepseek_mla(asked))


def _made(config: type[Any], **values: int) -> Any:
    """The configuration that has these values and defaults; None if there is none."""
    try:
        return config(**values)
    except Exception:  # of whatever kind: each type checks its values in its own way
        return None


def _is_unequal(config: type[Any]) -> bool:
    """Whether transformers says that what `KEYS` name differs between layers."""
    from transformers.integrations.heterogeneity.configuration_utils import (
        AmbiguousGlobalPerLayerAttributeError,
    )

    made = _made(config)
    try:
        for key in KEYS:
            getattr(made, key, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return True
    return False


def _defaults(config: type[Any], names: Mapping[str, str]) -> dict[str, int]:
    """Of `KEYS`, as far as there are any that do not follow from other values."""

    def stored(**values: int) -> dict[str, Any]:
        made = _made(config, **{names.get(key, key): value for key, value in values.items()})
        found = {} if made is None else vars(made)
        return {key: found.get(names.get(key, key)) for key in KEYS}

    plain = {key: value for key, value in stored().items() if isinstance(value, int)}
    for key in ("hidden_size", "num_attention_heads"):
        if key in plain:
            other = stored(**{key: 2 * plain[key]})
            plain = {
                name: value for name, value in plain.items() if name == key or other[name] == value
            }
    return plain


def main() -> int:
    os.environ["HF_HUB_OFFLINE"] = "1"  # some configurations would ask a hub for others
    with redirect_stdout(sys.stderr):  # where libraries print
        found = known_models()
    lines = [f'"endings": {json.dumps(found["endings"])}']
    for name in (
        "architectures",
        "removed",
        "types",
        "parsers",
    ):  # a line for each, so that changes can be read
        rows = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in found[name].items()]
        lines.append(f'"{name}": {{\n' + ",\n".join(rows) + "\n}")
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
