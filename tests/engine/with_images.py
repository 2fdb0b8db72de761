"""Small checkpoints that read images, whole: with the tokens, the chat template and the processor
that prompts with images are made by; and prompts made of them as vLLM makes them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.configs import CONFIGS
from tests.engine.shrunken import make_shrunken

QWEN2: Final = "qwen2-vl-7b-instruct"
QWEN2_5: Final = "qwen2.5-vl-7b-instruct"
QWEN3: Final = "qwen3-vl-8b-instruct"
QWEN3_MOE: Final = "qwen3-vl-30b-a3b-instruct"
GLM4: Final = "glm-4.1v-9b-thinking"
GLM4_MOE: Final = "glm-4.5v"
GEMMA3: Final = "gemma-3-4b-it"

MISTRAL3: Final = "mistral-small-3.1-24b-instruct-2503"
MINISTRAL3: Final = "ministral-3-8b-instruct-2512-bf16"
PIXTRAL: Final = "pixtral-12b"
LLAVA: Final = "llava-1.5-7b-hf"
INTERNVL3: Final = "internvl3-8b-hf"
LLAMA4: Final = "llama-4-scout-17b-16e-instruct"

NAMES: Final = (
    *(QWEN2, QWEN2_5, QWEN3, QWEN3_MOE, GEMMA3, GLM4, GLM4_MOE),
    *(MISTRAL3, MINISTRAL3, PIXTRAL, LLAVA, INTERNVL3, LLAMA4),
)

MOST_TOKENS: Final = 64
"""Of an image of Qwen's models here."""
GEMMA_TOKENS: Final = 4
"""Of an image of Gemma's here, whatever its size."""
SIDE: Final = 56
"""Pixels of a tile, or of the longer side of an image."""
PATCH: Final = 14
"""Pixels of the side of a patch."""
TILE_TOKENS: Final = (SIDE // PATCH) ** 2 // 4
"""Of InternVL's and Llama 4's here."""

_FIRST: Final = 259
"""The first id that the tokenizer of bytes leaves free."""
_COLOURS: Final = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

Files = Mapping[str, dict[str, Any]]


class Kind(NamedTuple):
    """What a family's checkpoints have for images."""

    words: tuple[str, ...]
    """Tokens; the first two are around a message."""
    image: str
    """What a chat template writes for an image."""
    config: Mapping[str, str | int]
    """Keys of the configuration, and their numbers or the words whose tokens they are."""
    files: Files
    """Of what prepares images."""
    named: Mapping[str, str] = {}
    """What the tokenizer calls words."""


_SQUARE: Final = (2 * PATCH) ** 2
"""Pixels of a token of Qwen's and GLM's here; published ones of Qwen3-VL have patches of 16."""


def _qwen(made: str) -> Kind:
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": f"{made}Processor",
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * _SQUARE, "longest_edge": MOST_TOKENS * _SQUARE},
        **_COLOURS,
    }
    videos = "Qwen3VL" if made == "Qwen3VL" else "Qwen2VL"
    files = {
        "preprocessor_config.json": images,
        "video_preprocessor_config.json": {
            **images,
            "video_processor_type": f"{videos}VideoProcessor",
        },
    }
    pad = "<|image_pad|>"
    start, end = "<|vision_start|>", "<|vision_end|>"
    return Kind(
        ("<|im_start|>", "<|im_end|>", start, end, pad, "<|video_pad|>"),
        start + pad + end,
        {
            "vision_start_token_id": start,
            "vision_end_token_id": end,
            "image_token_id": pad,
            "video_token_id": "<|video_pad|>",
        },
        files,
    )


_GLM_IMAGES: Final = {
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {
        "shortest_edge": 4 * (2 * PATCH) ** 2,
        "longest_edge": MOST_TOKENS * 2 * (2 * PATCH) ** 2,
    },
    **_COLOURS,
}
_GLM: Final = Kind(
    (
        *("<|user|>", "<|end|>", "<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
        *("<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
    ),
    "<|begin_of_image|><|image|><|end_of_image|>",
    {
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "image_token_id": "<|image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
        "video_token_id": "<|video|>",
    },
    {
        "preprocessor_config.json": {
            "image_processor_type": "Glm4vImageProcessor",
            "processor_class": "Glm4vProcessor",
            **_GLM_IMAGES,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Glm4vVideoProcessor",
            "processor_class": "Glm4vProcessor",
            **_GLM_IMAGES,
        },
    },
)

_GEMMA: Final = Kind(
    (
        *("<start_of_turn>", "<end_of_turn>"),
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        *("\n" * count for count in range(1, 5)),
    ),
    "<start_of_image>",
    {
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
        "image_token_index": "<image_soft_token>",
        "mm_tokens_per_image": GEMMA_TOKENS,
    },
    {
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": SIDE, "width": SIDE},
            "image_seq_length": GEMMA_TOKENS,
            **_COLOURS,
        },
        "processor_config.json": {
            "processor_class": "Gemma3Processor",
            "image_seq_length": GEMMA_TOKENS,
        },
    },
    {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
)


def _pixtral(merged: int) -> Kind:
    """Of images of any size, whose rows end with a token. `merged` patches side by side are one."""
    return Kind(
        ("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        {"image_token_index": "[IMG]"},
        {
            "preprocessor_config.json": {
                "image_processor_type": "PixtralImageProcessor",
                "processor_class": "PixtralProcessor",
                "patch_size": PATCH,
                "size": {"longest_edge": SIDE},
                **_COLOURS,
            },
            "processor_config.json": {
                "processor_class": "PixtralProcessor",
                "patch_size": PATCH,
                "spatial_merge_size": merged,
                "image_token": "[IMG]",
                "image_break_token": "[IMG_BREAK]",
                "image_end_token": "[IMG_END]",
            },
        },
    )


_LLAVA: Final = Kind(
    ("USER: ", "</s>\n", "<image>"),
    "<image>",
    {"image_token_index": "<image>"},
    {
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": SIDE},
            "crop_size": {"height": SIDE, "width": SIDE},
            **_COLOURS,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
        },
    },
)

_INTERNVL: Final = Kind(
    ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    "<IMG_CONTEXT>\n",
    {"image_token_id": "<IMG_CONTEXT>", "image_seq_length": TILE_TOKENS},
    {
        "preprocessor_config.json": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "processor_class": "InternVLProcessor",
            "crop_to_patches": False,  # as published: what prepares images says otherwise
            "min_patches": 1,
            "max_patches": 4,
            "size": {"height": SIDE, "width": SIDE},
            **_COLOURS,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "InternVLVideoProcessor",
            "processor_class": "InternVLProcessor",
            "size": {"height": SIDE, "width": SIDE},
            **_COLOURS,
        },
        "processor_config.json": {
            "processor_class": "InternVLProcessor",
            "image_seq_length": TILE_TOKENS,
        },
    },
    {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)

_LLAMA4: Final = Kind(
    (
        *("<|header_start|>", "<|eot|>", "<|image_start|>", "<|image_end|>", "<|image|>"),
        *("<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    ),
    "<|image|>",
    {
        "boi_token_index": "<|image_start|>",
        "eoi_token_index": "<|image_end|>",
        "image_token_index": "<|patch|>",
    },
    {
        "preprocessor_config.json": {
            "image_processor_type": "Llama4ImageProcessorFast",
            "processor_class": "Llama4Processor",
            "max_patches": 4,
            "resize_to_max_canvas": False,
            "size": {"height": SIDE, "width": SIDE},
            **_COLOURS,
        },
        "processor_config.json": {
            "processor_class": "Llama4Processor",
            "fake_image_token": "<|image|>",
            "image_token": "<|image|>",
            "patch_size": PATCH,
            "pixel_shuffle_ratio": 0.5,
        },
    },
)

_KINDS: Final[Mapping[str, Kind]] = {
    QWEN2: _qwen("Qwen2VL"),
    QWEN2_5: _qwen("Qwen2_5_VL"),
    QWEN3: _qwen("Qwen3VL"),
    QWEN3_MOE: _qwen("Qwen3VL"),
    GLM4: _GLM,
    GLM4_MOE: _GLM,
    GEMMA3: _GEMMA,
    MISTRAL3: _pixtral(2),
    MINISTRAL3: _pixtral(2),
    PIXTRAL: _pixtral(1),
    LLAVA: _LLAVA,
    INTERNVL3: _INTERNVL,
    LLAMA4: _LLAMA4,
}

_TEMPLATE: Final = (
    "{%- for message in messages -%}BEGIN{{ message['role'] }}\n"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}IMAGE{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}END\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}BEGINassistant\n{%- endif -%}"
)


class Picture(NamedTuple):
    """An image of random colours, the same in each process."""

    seed: int
    width: int
    height: int

    def image(self) -> Any:
        """Of Pillow."""
        import numpy as np
        from PIL import Image

        colours = np.random.default_rng(self.seed)
        pixels = colours.integers(0, 256, (self.height, self.width, 3), dtype=np.uint8)
        return Image.fromarray(pixels)


class ImagePrompt(NamedTuple):
    """Tokens, with one where each image is to be, and the images."""

    tokens: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()


def image_tokens(name: str) -> tuple[int, ...]:
    """What a chat template writes for an image."""
    kind, found = _KINDS[name], []
    rest = kind.image.rstrip("\n")
    while rest:
        word = next(word for word in kind.words if rest.startswith(word))
        found.append(_token(kind, word))
        rest = rest.removeprefix(word)
    return tuple(found)


def _token(kind: Kind, word: str) -> int:
    return _FIRST + kind.words.index(word)


def make_with_images(folder: Path, name: str) -> str:
    """Write the small checkpoint of one of `NAMES`, of float32; its path."""
    kind = _KINDS[name]
    config: dict[str, Any] = copy.deepcopy(CONFIGS[name])
    for key, value in kind.config.items():
        config[key] = _token(kind, value) if isinstance(value, str) else value
    path = Path(make_shrunken(folder, name, config))
    if config["vision_config"].get("model_type") in _RENAMED:
        _name_as_published(path / "model.safetensors")
    _add_tokens(path, kind)
    for file, content in kind.files.items():
        (path / file).write_text(json.dumps(content))
    return str(path)


_RENAMED: Final = ("siglip_vision_model", "clip_vision_model")


def _name_as_published(file: Path) -> None:
    """vLLM knows the names that published files have; transformers writes others by now."""
    from safetensors.torch import load_file, save_file

    old, new = "vision_tower.", "vision_tower.vision_model."
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _add_tokens(path: Path, kind: Kind) -> None:
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": [*kind.words]})
    assert tokenizer.convert_tokens_to_ids(kind.words[0]) == _FIRST
    begin, end, *_ = kind.words
    for word, token in (("BEGIN", begin), ("END", end), ("IMAGE", kind.image)):
        template = tokenizer.chat_template or _TEMPLATE
        tokenizer.chat_template = template.replace(word, token.replace("\n", "\\n"))
    tokenizer.save_pretrained(path)
    file = path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["extra_special_tokens"] = dict(kind.named)
    file.write_text(json.dumps(settings))


class Prepared(NamedTuple):
    """A prompt as a front end sends it: its tokens with all placeholders, and the images."""

    tokens: tuple[int, ...]
    features: list[Any]


class Preparer:
    """Makes prompts with images as vLLM's front half does, for one checkpoint."""

    def __init__(self, path: str, images: int, dtype: str = "float32") -> None:
        from vllm.config import ModelConfig
        from vllm.multimodal import MULTIMODAL_REGISTRY

        self.path = path
        config = ModelConfig(path, dtype=dtype, limit_mm_per_prompt={"image": images, "video": 0})
        self._processor = MULTIMODAL_REGISTRY.create_processor(config)

    def prepare(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> Prepared:
        """The prompt, of which `pictures` follow each other where its image tokens are."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec
        from vllm.multimodal.utils import argsort_mm_positions

        if not pictures:
            return Prepared(tuple(tokens), [])
        processor = self._processor
        images = {"image": [picture.image() for picture in pictures]}
        made = processor(list(tokens), processor.info.parse_mm_data(images))
        features = [
            MultiModalFeatureSpec(
                data=made["mm_kwargs"][modality][index],
                modality=modality,
                identifier=made["mm_hashes"][modality][index],
                mm_position=made["mm_placeholders"][modality][index],
                mm_hash=made["mm_hashes"][modality][index],
            )
            for modality, index in argsort_mm_positions(made["mm_placeholders"])
        ]
        return Prepared(tuple(made["prompt_token_ids"]), features)


PLAIN: Final = """
from appliance.engines.vllm.images.libraries import inspect_here, provide_torchvision
assert provide_torchvision()
inspect_here()
import vllm
from tests.engine.with_images import Picture
generate = vllm.LLM.generate

def generate_with_images(self, prompts, *args, **kwargs):
    made = []
    for prompt in prompts:
        tokens, pictures = prompt["prompt_token_ids"]
        one = {"prompt_token_ids": tokens}
        if pictures:
            images = [Picture(*picture).image() for picture in pictures]
            one["multi_modal_data"] = {"image": images}
        made.append(one)
    return generate(self, made, *args, **kwargs)

vllm.LLM.generate = generate_with_images
"""
"""What a process of plain vLLM runs first (`plain_process`): each prompt is an `ImagePrompt`."""
