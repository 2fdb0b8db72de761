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
GEMMA3: Final = "gemma-3-4b-it"

NAMES: Final = (QWEN2, QWEN2_5, QWEN3, QWEN3_MOE, GEMMA3)

MOST_TOKENS: Final = 64
"""Of an image of Qwen's models here."""
GEMMA_TOKENS: Final = 4
"""Of an image of Gemma's here, whatever its size."""

_QWEN_TOKENS: Final = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_GEMMA_TOKENS: Final = (
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    *("\n" * count for count in range(1, 5)),
)
_FIRST: Final = 259
"""The first id that the tokenizer of bytes leaves free."""

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
    if name == GEMMA3:
        return (_FIRST + 2,)
    return (_FIRST + 2, _FIRST + 4, _FIRST + 3)


def make_with_images(folder: Path, name: str) -> str:
    """Write the small checkpoint of one of `NAMES`, of float32; its path."""
    config: dict[str, Any] = copy.deepcopy(CONFIGS[name])
    if name == GEMMA3:
        config |= {
            "boi_token_index": _FIRST + 2,
            "eoi_token_index": _FIRST + 3,
            "image_token_index": _FIRST + 4,
            "mm_tokens_per_image": GEMMA_TOKENS,
        }
    else:
        config |= {
            "vision_start_token_id": _FIRST + 2,
            "vision_end_token_id": _FIRST + 3,
            "image_token_id": _FIRST + 4,
            "video_token_id": _FIRST + 5,
        }
    path = Path(make_shrunken(folder, name, config))
    if name == GEMMA3:
        _name_as_published(path / "model.safetensors")
    _add_tokens(path, name)
    for file, content in _processor(name).items():
        (path / file).write_text(json.dumps(content))
    return str(path)


def _name_as_published(file: Path) -> None:
    """vLLM knows the names that published files have; transformers writes others by now."""
    from safetensors.torch import load_file, save_file

    old, new = "vision_tower.", "vision_tower.vision_model."
    tensors = {name.replace(old, new): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _add_tokens(path: Path, name: str) -> None:
    import transformers

    added = _GEMMA_TOKENS if name == GEMMA3 else _QWEN_TOKENS
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": [*added]})
    assert tokenizer.convert_tokens_to_ids(added[0]) == _FIRST
    image = "".join(tokenizer.convert_ids_to_tokens(list(image_tokens(name))))
    for word, token in (("BEGIN", added[0]), ("END", added[1]), ("IMAGE", image)):
        tokenizer.chat_template = (tokenizer.chat_template or _TEMPLATE).replace(word, token)
    tokenizer.save_pretrained(path)
    if name == GEMMA3:
        file = path / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        settings["extra_special_tokens"] = {
            "boi_token": added[2],
            "eoi_token": added[3],
            "image_token": added[4],
        }
        file.write_text(json.dumps(settings))


def _processor(name: str) -> Mapping[str, dict[str, Any]]:
    """Files by their names."""
    colours = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    if name == GEMMA3:
        return {
            "preprocessor_config.json": {
                "image_processor_type": "Gemma3ImageProcessor",
                "processor_class": "Gemma3Processor",
                "size": {"height": 56, "width": 56},
                "image_seq_length": GEMMA_TOKENS,
                **colours,
            },
            "processor_config.json": {
                "processor_class": "Gemma3Processor",
                "image_seq_length": GEMMA_TOKENS,
            },
        }
    patch = 14  # published ones of Qwen3-VL have 16
    pixels = (2 * patch) ** 2
    made = {QWEN2: "Qwen2VL", QWEN2_5: "Qwen2_5_VL"}.get(name, "Qwen3VL")
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": f"{made}Processor",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * pixels, "longest_edge": MOST_TOKENS * pixels},
        **colours,
    }
    videos = "Qwen3VL" if made == "Qwen3VL" else "Qwen2VL"
    return {
        "preprocessor_config.json": images,
        "video_preprocessor_config.json": {
            **images,
            "video_processor_type": f"{videos}VideoProcessor",
        },
    }


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
