"""The language models in checkpoints that read images or sound as well: they alone are served, as
the models of text that they are. What reads the rest (towers, and projectors behind them) is not
loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from appliance.checkpoints.architectures.chat_sounds import (
    COMPUTED,
    HEARS,
    PHI_4_MM,
    QWEN2_AUDIO,
    VOXTRAL,
    WITH_CODE,
)
from appliance.checkpoints.model_config import ModelConfig, read_model_config
from appliance.checkpoints.safetensors import TensorEntry, WeightFile
from appliance.errors import CheckpointError


class Media(NamedTuple):
    """What is known of an architecture that reads images or sound."""

    towers: frozenset[str]
    """What its parts are called that are not loaded."""
    languages: Mapping[str, str]
    """The architectures of its language models, by their types."""
    seen: int | None = None
    """The layer of the tower behind which the rest is not computed, where the file does not say
    `vision_feature_layer`. None if all layers are, whatever it says."""
    adapted: bool = False
    """Whether layers of the language model are stored with LoRA adapters for what else is read:
    text is computed without them."""


_PROJECTED: Final = frozenset({"vision_tower", "multi_modal_projector"})
_VISUAL: Final = frozenset({"visual"})
_HEARD: Final = frozenset({"audio_tower", "multi_modal_projector"})
_ALL: Final = frozenset({"vision_tower", "audio_tower", "embed_vision", "embed_audio"})

MEDIA: Final[Mapping[str, Media]] = {
    "Gemma3ForConditionalGeneration": Media(_PROJECTED, {"gemma3_text": "Gemma3ForCausalLM"}),
    "Gemma3nForConditionalGeneration": Media(_ALL, {"gemma3n_text": "Gemma3nForCausalLM"}),
    "Gemma4ForConditionalGeneration": Media(_ALL, {"gemma4_text": "Gemma4ForCausalLM"}),
    "Glm4vForConditionalGeneration": Media(_VISUAL, {"glm4v_text": "Glm4ForCausalLM"}),
    "Glm4vMoeForConditionalGeneration": Media(_VISUAL, {"glm4v_moe_text": "Glm4MoeForCausalLM"}),
    "InternVLForConditionalGeneration": Media(
        _PROJECTED, {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    ),
    "Llama4ForConditionalGeneration": Media(
        frozenset({"vision_model", "multi_modal_projector"}), {"llama4_text": "Llama4ForCausalLM"}
    ),
    "LlavaForConditionalGeneration": Media(
        _PROJECTED, {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}, seen=-2
    ),
    "Mistral3ForConditionalGeneration": Media(
        _PROJECTED,
        {"ministral3": "Ministral3ForCausalLM", "mistral": "MistralForCausalLM"},
        seen=-1,
    ),
    PHI_4_MM: Media(
        frozenset({"embed_tokens_extend"}), {"phi4mm": "Phi3ForCausalLM"}, adapted=True
    ),
    QWEN2_AUDIO: Media(_HEARD, {"qwen2": "Qwen2ForCausalLM"}),
    "Qwen2VLForConditionalGeneration": Media(_VISUAL, {"qwen2_vl_text": "Qwen2ForCausalLM"}),
    "Qwen2_5_VLForConditionalGeneration": Media(_VISUAL, {"qwen2_5_vl_text": "Qwen2ForCausalLM"}),
    "Qwen3VLForConditionalGeneration": Media(_VISUAL, {"qwen3_vl_text": "Qwen3ForCausalLM"}),
    "Qwen3VLMoeForConditionalGeneration": Media(
        _VISUAL, {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"}
    ),
    "Qwen3_5ForConditionalGeneration": Media(_VISUAL, {"qwen3_5_text": "Qwen3_5ForCausalLM"}),
    "Qwen3_5MoeForConditionalGeneration": Media(
        _VISUAL, {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}
    ),
    VOXTRAL: Media(_HEARD, {"llama": "LlamaForCausalLM"}),
}
"""By architecture. These are what `tests/engine/test_language_models.py` serves: of others it is
not known what is to be left out, and how the rest is to be computed."""

TRANSPOSED_EXPERTS: Final = frozenset({"qwen3_vl_moe_text"})
"""Types of language models whose experts lie ``[experts, in, out]`` in files, which those of the
same architecture alone do not."""

READS_IMAGES: Final = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
"""Those of `MEDIA` that are served whole where `images` says so. These are what
`tests/engine/test_image_prompts.py` serves."""

RENAMED: Final = (
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", ""),
)
"""What names of tensors begin with, and with what they begin in a checkpoint of text alone: there
are names of transformers before its version 4.52, and after."""

_LLAVA: Final = "LlavaForConditionalGeneration"
_MISTRAL3: Final = "Mistral3ForConditionalGeneration"
_INTERNVL: Final = "InternVLForConditionalGeneration"
_SEEN: Final = "vision_feature_layer"
_CHOSEN: Final = "vision_feature_select_strategy"
_LAYER: Final = re.compile(r"\.layers?\.(\d+)\.")
_ADAPTER: Final = re.compile(r"\.lora_[AB]\.")
_ADAPTED: Final = ".base_layer."
"""In names of what adapters are for."""
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
_TEKKEN: Final = "tekken.json"
_CONSOLIDATED: Final = "consolidated*.safetensors"
"""With such files next to tekken.json, vLLM takes the latter for the tokenizer."""
_TEMPLATE: Final = "chat_template.json"
_NEWER_TEMPLATE: Final = "chat_template.jinja"


def served_architecture(config: ModelConfig) -> str:
    """The architecture that is computed: of the language model alone, if the checkpoint is one of
    `MEDIA`; empty if that is of a type that is not known here."""
    return computed_architecture(config.architecture, config.model_type)


def computed_architecture(architecture: str, model_type: str) -> str:
    """The same of a checkpoint of this architecture, whose language model is of this type."""
    media = MEDIA.get(architecture)
    return architecture if media is None else media.languages.get(model_type, "")


def language_tensors(file: WeightFile, architecture: str) -> WeightFile:
    """The file without what is not loaded, if the architecture is one of `MEDIA`: the tensors that
    are left have the names of a checkpoint of text alone."""
    media = MEDIA.get(architecture)
    if media is None:
        return file
    return replace(
        file,
        tensors=tuple(
            tensor._replace(name=language_layer(tensor.name, architecture))
            for tensor in file.tensors
            if _part(tensor.name) not in media.towers
            and not (media.adapted and _ADAPTER.search(tensor.name))
        ),
    )


def language_layer(name: str, architecture: str) -> str:
    """What a layer of the language model, or a tensor of it, is called in a checkpoint of text
    alone."""
    media = MEDIA.get(architecture)
    if media is None:
        return name
    return _renamed(name.replace(_ADAPTED, ".") if media.adapted else name)


def image_tensors(files: Iterable[WeightFile], config: ModelConfig) -> list[TensorEntry]:
    """The tensors that `language_tensors` leaves out, under their own names, as far as a model that
    is served whole takes them from files: not those of layers of the tower whose output is not
    used, nor those that vLLM computes."""
    media = MEDIA.get(config.architecture)
    if media is None:
        return []
    computed = COMPUTED.get(config.architecture, frozenset())
    found = [
        (tensor, _LAYER.search(tensor.name))
        for file in files
        for tensor in file.tensors
        if _part(tensor.name) in media.towers and tensor.name.removeprefix("model.") not in computed
    ]
    count = 1 + max((int(layer[1]) for _, layer in found if layer), default=-1)
    used = _layers_used(config, media, count)
    return [tensor for tensor, layer in found if layer is None or int(layer[1]) < used]


def _layers_used(config: ModelConfig, media: Media, count: int) -> int:
    """Of so many layers of a tower."""
    if media.seen is None:
        return count
    said = config.whole.get(_SEEN)
    layer = media.seen if said is None else said
    if not isinstance(layer, int):
        raise CheckpointError(f"{config.path}: {_SEEN} is {said!r}, not a layer")
    return layer if layer >= 0 else count + layer + 1


def why_no_images(
    config: ModelConfig, *, ranks: int = 1, cuda: bool = False, libraries: bool = True
) -> str:
    """Why the checkpoint's model cannot be served with images: of so many `ranks`, on a GPU if
    `cuda`, with torchvision if `libraries`; empty if it can."""
    if config.architecture in HEARS:
        return f"{config.architecture} reads sound, and no images"
    if config.architecture == PHI_4_MM:
        return WITH_CODE
    if config.architecture not in READS_IMAGES:
        return f"images of {config.architecture} are not served, only text"
    if wrong := _why_not_settings(config):
        return f"{wrong}: its images are not served, only text"
    if wrong := _why_not_files(config.path) or _why_not_sizes(config):
        return wrong
    if cuda:
        return "images are not served on GPUs by this version, only text"
    if ranks > 1:
        return "images are not served by several ranks, only text"
    if not libraries:
        return "torchvision is not there, which models that read images need: run `make install`"
    return ""


_CLIP: Final = "clip_vision_model"
_CROPPING: Final = ("CLIP", "Llava")
"""How classes are called that cut the middle out of an image, unless their settings say not to."""
_OF_TILES: Final = ("LlavaNext", "LlavaOnevision")
"""How those are called that make several squares of it."""
_SIDES: Final = ("height", "width")
_USUAL_SIDE: Final = 224
"""Where settings say none."""


def _why_not_files(path: Path) -> str:
    """Of what prepares images and prompts."""
    if not any((path / name).exists() for name in _PROCESSORS):
        return f"{path} has neither of {' and '.join(_PROCESSORS)}, which say how to prepare images"
    if (path / _TEKKEN).exists() and (
        any(path.glob(_CONSOLIDATED)) or not (path / "tokenizer.json").exists()
    ):
        return f"images are not served where vLLM tokenizes by {_TEKKEN}, and not tokenizer.json"
    return ""


def _why_not_sizes(config: ModelConfig) -> str:
    """Of families whose image processor makes images of a size that its file states, and whose
    tower has positions for another."""
    if config.architecture not in (_LLAVA, _MISTRAL3):
        return ""
    vision = config.whole.get("vision_config")
    if not isinstance(vision, dict):
        return ""
    most = vision.get("image_size")
    if not isinstance(most, int):  # transformers has a default
        return ""
    try:
        settings = _processor(config.path)
    except (OSError, ValueError) as error:
        return f"{config.path}: what prepares images cannot be read: {error}"
    if vision.get("model_type") == _CLIP:
        return _why_not_square(settings, most)
    said = settings.get("size")
    for side in said.values() if isinstance(said, dict) else [said]:
        if isinstance(side, int) and side > most:
            return (
                f"what prepares images makes them as large as {side} (size), and the model "
                f"has positions for {most} (image_size of vision_config)"
            )
    return ""


def _why_not_square(settings: Mapping[str, Any], side: int) -> str:
    """Of a tower that reads squares of this side alone: vLLM counts their tokens by it, and takes
    no others."""
    kind = str(settings.get("image_processor_type") or _CROPPING[0])
    if kind.startswith(_OF_TILES):
        return (
            f"{kind} makes several squares of an image, and the model reads one: take LLaVA 1.5's"
        )
    cropped = settings.get("do_center_crop", kind.startswith(_CROPPING))
    if not cropped and settings.get("do_resize") is False:
        return (
            "what prepares images neither crops nor scales them (do_center_crop, do_resize), and "
            f"the model reads {side} x {side} alone (image_size of vision_config)"
        )
    key = "crop_size" if cropped else "size"
    said = settings.get(key, dict.fromkeys(_SIDES, _USUAL_SIDE))
    if cropped and isinstance(said, int):
        said = dict.fromkeys(_SIDES, said)
    if not isinstance(said, dict):
        said = {}
    if all([said.get(name) == side for name in _SIDES]):
        return ""
    return (
        f"what prepares images does not make them {side} x {side} ({key} has to say so), which is "
        "the only size that the model reads (image_size of vision_config)"
    )


def _processor(path: Path) -> dict[str, Any]:
    """The settings of the image processor, from where transformers takes them. Raises `OSError`, or
    `ValueError` for what is no JSON."""
    own, whole = (
        json.loads(file.read_text(encoding="utf-8")) if (file := path / name).exists() else {}
        for name in _PROCESSORS
    )
    inner = whole.get("image_processor") if isinstance(whole, dict) else None
    found = own if inner is None else inner
    return found if isinstance(found, dict) else {}


def _why_not_settings(config: ModelConfig) -> str:
    """Of what is taken from the tower."""
    name, layer = config.architecture, config.whole.get(_SEEN)
    if name == _LLAVA and (wrong := _why_not_llava(config)):
        return wrong
    if name in (_LLAVA, _MISTRAL3) and isinstance(layer, list):
        return f"{_SEEN} of {name} is {layer}, and vLLM computes one layer"
    if name != _INTERNVL:
        return ""
    if layer not in (None, -1):
        return f"{_SEEN} of {name} is {layer!r}, and vLLM takes the last (-1)"
    chosen = config.whole.get(_CHOSEN, "default")
    if chosen != "default":
        return f"{_CHOSEN} of {name} is {chosen!r}, and vLLM computes 'default'"
    return ""


def _why_not_llava(config: ModelConfig) -> str:
    """Of this architecture there are models with several towers."""
    vision = config.whole.get("vision_config")
    tower = vision.get("model_type") if isinstance(vision, dict) else None
    if tower not in (_CLIP, "pixtral"):
        return f"no test serves {_LLAVA} with a tower of type {tower}"
    chosen = config.whole.get(_CHOSEN, "default")
    if tower == "pixtral" and chosen != "full":  # vLLM leaves out the first patch of a step
        return f"{_CHOSEN} is {chosen!r}, and Pixtral's images need 'full'"
    return ""


def image_token_bytes(config: ModelConfig, number_bytes: int) -> int:
    """What the encoder makes of each token of an image or a sound, in numbers of so many bytes: a
    row of the hidden size, and one more for each layer that Qwen3-VL adds what it saw to."""
    vision = config.whole.get("vision_config")
    layers = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    rows = 1 + (len(layers) if isinstance(layers, list) else 0)
    return rows * config.integer("hidden_size") * number_bytes


def processor_template(path: Path) -> str:
    """The chat template of the checkpoint in `path`, if it is one of `MEDIA` and the file of what
    prepares images has it; empty otherwise. Tokenizers do not read that file.

    Raises `CheckpointError` for files that cannot be read.
    """
    file = path / _TEMPLATE
    if read_model_config(path).architecture not in MEDIA:
        return ""
    if not file.exists() or (path / _NEWER_TEMPLATE).exists():
        return ""
    try:
        template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} has no chat_template: {error}") from error
    if not isinstance(template, str) or "{" not in template:  # vLLM would take it for a path
        raise CheckpointError(f"{file}: chat_template is no template")
    return template


def _part(name: str) -> str:
    """What part of the whole a tensor is of."""
    return name.removeprefix("model.").partition(".")[0]


def _renamed(name: str) -> str:
    for old, new in RENAMED:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
