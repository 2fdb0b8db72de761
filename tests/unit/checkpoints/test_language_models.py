"""Of checkpoints that read images, the language model alone is described, loaded and configured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import AutoConfig

from appliance.checkpoints.architectures.chat_sounds import why_no_sounds
from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.families import UnsupportedModel, check_family, is_tried
from appliance.checkpoints.language_models import (
    MEDIA,
    READS_IMAGES,
    image_tensors,
    language_tensors,
    processor_template,
    served_architecture,
    why_no_images,
)
from appliance.checkpoints.model_config import known_models, read_model_config
from appliance.checkpoints.overrides import language_config, whole_config
from appliance.checkpoints.quantized.quantization import multiplied
from appliance.checkpoints.safetensors import TensorEntry, WeightFile
from appliance.checkpoints.task import check_task
from appliance.config.checks import warnings
from appliance.config.loader import load_config
from appliance.errors import CheckpointError, ConfigError
from appliance.platform import torchvision
from tests.configs import CONFIGS, REFUSED

Make = Callable[..., Path]
GEMMA, QWEN = "gemma-3-4b-it", "qwen2.5-vl-7b-instruct"


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_all_that_is_tried_is_known() -> None:
    """To vLLM, with its language models, none of which reads images itself."""
    for name, media in MEDIA.items():
        assert "media" in known_models().architectures[name]
        assert set(media.languages) <= set(known_models().types)
        for language in media.languages.values():
            assert "media" not in known_models().architectures[language]


def test_what_is_computed(tmp_path: Path) -> None:
    gemma = read_model_config(write(tmp_path, CONFIGS[GEMMA]))
    assert served_architecture(gemma) == "Gemma3ForCausalLM"
    assert is_tried(gemma)
    assert served_architecture(read_model_config(write(tmp_path, CONFIGS["gpt2"]))) == (
        "GPT2LMHeadModel"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["LlavaNextForConditionalGeneration"]}, "no test serves its text$|; "),
        (
            {"text_config": CONFIGS[GEMMA]["text_config"] | {"model_type": "gemma2"}},
            "no test serves its text with a language model of type gemma2",
        ),
    ],
)
def test_what_is_not_tried_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    config = read_model_config(write(tmp_path, CONFIGS[GEMMA] | changes))
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        check_family(config)
    assert caught.value.remedy == "take a checkpoint of a model that reads text only"


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        (
            "Gemma3ForConditionalGeneration",
            {
                "language_model.model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate.weight",
                "language_model.lm_head.weight": "lm_head.weight",
                "vision_tower.vision_model.embeddings.patch_embedding.weight": None,
                "multi_modal_projector.mm_input_projection_weight": None,
                # The same since version 4.52 of transformers.
                "model.language_model.norm.weight": "model.norm.weight",
                "lm_head.weight": "lm_head.weight",
                "model.vision_tower.ln_pre.weight": None,
                "model.multi_modal_projector.linear_1.weight": None,
            },
        ),
        (
            "Qwen2_5_VLForConditionalGeneration",
            {
                "model.embed_tokens.weight": "model.embed_tokens.weight",
                "visual.merger.ln_q.weight": None,
                "model.language_model.embed_tokens.weight": "model.embed_tokens.weight",
                "model.visual.merger.ln_q.weight": None,
            },
        ),
        (
            "Phi4MMForCausalLM",
            {
                "model.embed_tokens.weight": "model.embed_tokens.weight",
                "model.layers.0.self_attn.qkv_proj.base_layer.weight": (
                    "model.layers.0.self_attn.qkv_proj.weight"
                ),
                "model.layers.0.self_attn.qkv_proj.lora_A.vision.weight": None,
                "model.layers.0.self_attn.qkv_proj.lora_B.speech.weight": None,
                "model.embed_tokens_extend.image_embed.glb_GN": None,
                "model.embed_tokens_extend.audio_embed.encoder.encoders.0.layer_norm.bias": None,
                "model.norm.weight": "model.norm.weight",
            },
        ),
        (
            "LlamaForCausalLM",
            {
                "model.visual.weight": "model.visual.weight",
                "layers.0.base_layer.weight": "layers.0.base_layer.weight",
                "layers.0.lora_A.weight": "layers.0.lora_A.weight",
            },
        ),
    ],
)
def test_names_of_tensors(architecture: str, names: dict[str, str | None]) -> None:
    tensors = tuple(TensorEntry(name, "F32", (1,), 0, 4) for name in names)
    file = WeightFile(Path("model.safetensors"), 4, 0, 0, tensors)
    kept = language_tensors(file, architecture).tensors
    assert [tensor.name for tensor in kept] == [name for name in names.values() if name]


def test_sizes_are_those_of_the_language_model(fake_checkpoint: Make) -> None:
    """KV as well: geometry is in the part of the file about it."""
    numbers = np.zeros((16, 256), np.float32)
    path = fake_checkpoint("text")
    names = ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight")
    save_file(dict.fromkeys(names, numbers), path / "model.safetensors")
    text = read_checkpoint("text", path)
    whole = json.loads((path / "config.json").read_text())
    path = fake_checkpoint(
        "reader",
        architectures=["LlavaForConditionalGeneration"],
        model_type="llava",
        text_config=whole | {"model_type": "llama"},
        vision_config={"model_type": "clip_vision_model", "hidden_size": 1024},
        num_hidden_layers=99,
        num_attention_heads=99,
    )
    towers = {"vision_tower.weight": numbers, "multi_modal_projector.weight": numbers}
    tensors = {f"language_model.{name}": numbers for name in names} | towers
    save_file(tensors, path / "model.safetensors")
    reader = read_checkpoint("reader", path)
    assert (reader.kv, reader.layers) == (text.kv, text.layers)
    assert (reader.weight_bytes, reader.parameters) == (text.weight_bytes, text.parameters)
    assert reader.architecture == "LlavaForConditionalGeneration"


def test_it_generates_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIGS[QWEN])
    check_task(path)
    with pytest.raises(CheckpointError, match="its task would have to be generate, not embed"):
        check_task(path, "embed")


def test_a_check_of_the_configuration_says_that_images_are_refused(
    fake_checkpoint: Make, tmp_path: Path
) -> None:
    text = json.loads((fake_checkpoint("text") / "config.json").read_text())
    changes = {"model_type": "llava", "text_config": text | {"model_type": "llama"}}
    path = fake_checkpoint(architectures=["LlavaForConditionalGeneration"], **changes)
    file = tmp_path / "appliance.toml"
    table = '[[model]]\nname = "a"\npath = "tiny"\nmax_context = 256\n'
    file.write_text(f'[devices]\nmemory = "8MiB"\n{table}')
    (warning,) = warnings(load_config(file))
    assert warning == (
        "model.a: LlavaForConditionalGeneration is served for text only; requests with images are "
        "refused; see images"
    )

    config = json.loads((path / "config.json").read_text())
    write(path, text | {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"})
    (warning,) = warnings(load_config(file))
    assert warning == (
        "model.a: Phi4MMForCausalLM is served for text only; requests with images and sound are "
        "refused"
    )

    write(path, config | {"architectures": ["LlavaNextForConditionalGeneration"]})
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = caught.value.problems
    assert "LlavaNextForConditionalGeneration reads images, which is not supported" in problem.wrong
    assert problem.remedy.startswith("take a checkpoint")


def test_vllm_is_given_the_language_models_configuration() -> None:
    """With what the whole one says of it, and rotary embeddings with one position."""
    text = SimpleNamespace(
        model_type="qwen2_5_vl_text",
        dtype=None,
        eos_token_id=1,
        tie_word_embeddings=False,
        rope_parameters={"type": "mrope", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    )
    whole = SimpleNamespace(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        dtype="bfloat16",
        eos_token_id=2,
        tie_word_embeddings=True,
        get_text_config=lambda: text,
    )
    assert language_config(whole) is text
    assert text.architectures == ["Qwen2ForCausalLM"]
    assert (text.dtype, text.eos_token_id, text.tie_word_embeddings) == ("bfloat16", 2, True)
    assert text.rope_parameters == {"type": "default", "rope_theta": 1e6}
    other: Any = SimpleNamespace(architectures=["LlamaForCausalLM"])
    other.get_text_config = lambda: other
    assert language_config(other) is other


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("kind", "quantization", "forgotten"),
    [
        ("qwen2_5_vl", {"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
        ("qwen3_vl_moe", {"quant_method": "awq", "bits": 4}, True),
        ("qwen2_5_vl", {"quant_method": "awq", "bits": 4}, False),
    ],
)
def test_vllm_sees_no_quantization_of_products(
    tmp_path: Path,
    images: bool,
    inside: bool,
    kind: str,
    quantization: dict[str, Any],
    forgotten: bool,
) -> None:
    """Wherever the file says it, as long as the daemon takes weights for products."""
    architecture = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl_moe": "Qwen3VLMoe"}[kind]
    text: dict[str, Any] = {"model_type": f"{kind}_text"}
    whole = {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
    }
    (text if inside else whole)["quantization_config"] = quantization
    path = write(tmp_path, whole)
    config = AutoConfig.from_pretrained(path)

    assert (multiplied(read_model_config(path)) is not None) == forgotten
    seen = (whole_config if images else language_config)(config)

    said = [getattr(part, "quantization_config", None) for part in (seen, seen.get_text_config())]
    assert any(said) != forgotten


def test_templates_of_what_prepares_images(tmp_path: Path) -> None:
    """They are taken where a newer file has none."""
    path = write(tmp_path, CONFIGS[GEMMA])
    assert processor_template(path) == ""
    (path / "chat_template.json").write_text('{"chat_template": "{{ old }}"}')
    assert processor_template(path) == "{{ old }}"
    (path / "chat_template.json").write_text("[]")
    with pytest.raises(CheckpointError, match="has no chat_template"):
        processor_template(path)
    (path / "chat_template.jinja").write_text("{{ new }}")
    assert processor_template(path) == ""
    write(tmp_path, CONFIGS["gpt2"])
    (path / "chat_template.jinja").unlink()
    assert processor_template(path) == ""


def test_what_reads_images_is_counted_where_prompts_have_some(fake_checkpoint: Make) -> None:
    numbers = np.zeros((16, 256), np.float32)
    text = json.loads((fake_checkpoint("text") / "config.json").read_text())
    path = fake_checkpoint(
        architectures=["Gemma3ForConditionalGeneration"],
        model_type="gemma3",
        text_config=text | {"model_type": "gemma3_text"},
    )
    language = dict.fromkeys(("language_model.lm_head.weight",), numbers)
    towers = {"vision_tower.weight": numbers, "multi_modal_projector.weight": numbers}
    save_file(language | towers, path / "model.safetensors")

    alone, whole = (read_checkpoint("reader", path, images=images) for images in (0, 3))

    more = 2 * numbers.size
    assert whole.parameters - alone.parameters == more
    assert whole.weight_bytes - alone.weight_bytes == more * 2  # in bfloat16
    assert (whole.kv, whole.layers) == (alone.kv, alone.layers)


@pytest.mark.parametrize(
    ("changes", "devices", "wrong"),
    [
        ({}, "", ""),
        (
            {"architectures": ["LlavaForConditionalGeneration"]},
            "",
            "tower of type None",
        ),
        ({}, "tensor_parallel = 2\n", "by several ranks"),
    ],
)
def test_images_are_refused_where_they_cannot_be_read(
    fake_checkpoint: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    devices: str,
    wrong: str,
) -> None:
    monkeypatch.setattr(torchvision, "is_there", lambda: True)
    text = json.loads((fake_checkpoint("text") / "config.json").read_text())
    text["model_type"] = "gemma3_text" if "architectures" not in changes else "llama"
    gemma: dict[str, Any] = {"architectures": ["Gemma3ForConditionalGeneration"]}
    path = fake_checkpoint(**{**gemma, "model_type": "gemma3", "text_config": text, **changes})
    (path / "preprocessor_config.json").write_text("{}")
    file = tmp_path / "appliance.toml"
    table = '[[model]]\nname = "a"\npath = "tiny"\nmax_context = 256\nimages = 2\n'
    file.write_text(f'[devices]\nmemory = "8MiB"\n{devices}{table}')
    if not wrong:
        assert not [warning for warning in warnings(load_config(file)) if "text only" in warning]
        monkeypatch.setattr(torchvision, "is_there", lambda: False)
        wrong = "torchvision is not there, .* run `make install`"
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (problem,) = [one for one in caught.value.problems if one.key == "model[0].images"]
    assert re.search(wrong, problem.wrong)
    assert problem.remedy == "use images = 0"


def test_phi_4_multimodal_is_served_for_text_only(tmp_path: Path) -> None:
    """Without the code that its file names, which vLLM would prepare images and sounds with; no
    test serves it with quantized weights."""
    config = read_model_config(write(tmp_path, CONFIGS["phi-4-multimodal-instruct"]))
    check_family(config)
    assert is_tried(config)
    assert served_architecture(config) == "Phi3ForCausalLM"
    for why_not in (why_no_images(config), why_no_sounds(config)):
        assert "not served, only text: vLLM prepares them with code that comes with" in why_not
    with pytest.raises(CheckpointError, match="reads images and sound, of which the text"):
        check_task(tmp_path, "embed")
    for quantization in (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ):
        changed = config.whole | {"quantization_config": quantization}
        with pytest.raises(UnsupportedModel, match="no test serves Phi4MMForCausalLM with weights"):
            check_family(read_model_config(write(tmp_path, changed)))


def with_files(folder: Path, config: dict[str, Any], *files: str) -> Path:
    """As LLaVA's are published; others leave the key out."""
    for name in files:
        (folder / name).write_text('{"crop_size": 336}')
    return write(folder, config)


READERS = [
    name
    for name, config in CONFIGS.items()
    if config["architectures"][0] in READS_IMAGES and name not in REFUSED
]


@pytest.mark.parametrize("name", READERS)
def test_images_of_published_models_are_served(tmp_path: Path, name: str) -> None:
    path = with_files(tmp_path, CONFIGS[name], "preprocessor_config.json")
    assert why_no_images(read_model_config(path)) == ""


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ((), "neither of preprocessor_config.json and processor_config.json"),
        (("processor_config.json",), ""),
        (("processor_config.json", "tekken.json"), "where vLLM tokenizes by tekken.json"),
        (("processor_config.json", "tekken.json", "tokenizer.json"), ""),
        (
            ("processor_config.json", "tekken.json", "tokenizer.json", "consolidated.safetensors"),
            "where vLLM tokenizes by tekken.json",
        ),
    ],
)
def test_files_that_images_need(tmp_path: Path, files: tuple[str, ...], wrong: str) -> None:
    config = CONFIGS["mistral-small-3.1-24b-instruct-2503"]
    found = why_no_images(read_model_config(with_files(tmp_path, config, *files)))
    assert wrong in found
    assert bool(found) == bool(wrong)


@pytest.mark.parametrize(
    ("name", "changes", "wrong"),
    [
        ("llava-1.5-7b-hf", {"vision_config": {"model_type": "siglip_vision_model"}}, "a tower of"),
        ("pixtral-12b", {"vision_feature_select_strategy": "default"}, "is 'default'"),
        ("pixtral-12b", {"vision_feature_select_strategy": None}, "is None"),
        (
            "llava-1.5-7b-hf",
            {"vision_feature_layer": [-2, -1]},
            "is [-2, -1], and vLLM computes one",
        ),
        (
            "mistral-small-3.1-24b-instruct-2503",
            {"vision_feature_layer": [-1, -5]},
            "vision_feature_layer of Mistral3ForConditionalGeneration is [-1, -5]",
        ),
        ("internvl3-8b-hf", {"vision_feature_layer": -2}, "is -2, and vLLM takes the last (-1)"),
        ("internvl3-8b-hf", {"vision_feature_layer": [-1]}, "is [-1], and vLLM takes the last"),
        ("internvl3-8b-hf", {"vision_feature_select_strategy": "full"}, "is 'full', and vLLM"),
    ],
)
def test_readers_with_what_is_not_computed(
    tmp_path: Path, name: str, changes: dict[str, Any], wrong: str
) -> None:
    path = with_files(tmp_path, CONFIGS[name] | changes, "preprocessor_config.json")
    found = why_no_images(read_model_config(path))
    assert wrong in found
    assert found.endswith("its images are not served, only text")


@pytest.mark.parametrize(
    ("name", "file", "settings", "wrong"),
    [
        ("pixtral-12b", 0, {"size": {"longest_edge": 1024}}, ""),
        ("pixtral-12b", 0, {"size": {"longest_edge": 1540}}, "as large as 1540 (size), and the"),
        (
            "pixtral-12b",
            1,
            {"image_processor": {"size": {"longest_edge": 1540}}},
            "positions for 1024",
        ),
        ("pixtral-12b", 1, {"size": {"longest_edge": 1540}}, ""),
        ("mistral-small-3.1-24b-instruct-2503", 0, {"size": {"longest_edge": 2048}}, "for 1540"),
        ("llava-1.5-7b-hf", 0, {"crop_size": {"height": 336, "width": 336}}, ""),
        (
            "llava-1.5-7b-hf",
            0,
            {"image_processor_type": "LlavaNextImageProcessor", "crop_size": 336},
            "several squares of an image",
        ),
        (
            "llava-1.5-7b-hf",
            0,
            {"do_center_crop": False, "do_resize": False, "size": {"height": 336, "width": 336}},
            "neither crops nor scales them",
        ),
        ("llava-1.5-7b-hf", 0, {"crop_size": 448}, "does not make them 336 x 336 (crop_size has"),
        ("llava-1.5-7b-hf", 0, {"crop_size": 168}, "does not make them 336 x 336 (crop_size has"),
        ("llava-1.5-7b-hf", 0, [], "does not make them 336 x 336 (crop_size has"),
        ("llava-1.5-7b-hf", 0, {"do_center_crop": False}, "does not make them 336 x 336 (size has"),
    ],
)
def test_images_are_prepared_as_the_tower_takes_them(
    tmp_path: Path, name: str, file: int, settings: Any, wrong: str
) -> None:
    path = write(tmp_path, CONFIGS[name])
    files = ("preprocessor_config.json", "processor_config.json")
    (path / files[file]).write_text(json.dumps(settings))
    found = why_no_images(read_model_config(path))
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_what_prepares_images_is_json(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIGS["llava-1.5-7b-hf"])
    (path / "preprocessor_config.json").write_text("{")
    assert "what prepares images cannot be read" in why_no_images(read_model_config(path))


@pytest.mark.parametrize(
    ("name", "changes", "layers"),
    [
        ("llava-1.5-7b-hf", {}, 3),
        ("llava-1.5-7b-hf", {"vision_feature_layer": None}, 3),
        ("llava-1.5-7b-hf", {"vision_feature_layer": 2}, 2),
        ("mistral-small-3.1-24b-instruct-2503", {}, 4),
        ("internvl3-8b-hf", {}, 4),
    ],
)
def test_layers_behind_the_one_that_is_taken_are_not_counted(
    tmp_path: Path, name: str, changes: dict[str, Any], layers: int
) -> None:
    """Nor loaded."""
    config = read_model_config(write(tmp_path, CONFIGS[name] | changes))
    list_of = "layer" if "internvl" in name else "layers"
    names = [f"vision_tower.encoder.{list_of}.{number}.weight" for number in range(4)]
    names += ["vision_tower.patch.weight", "model.multi_modal_projector.weight"]
    tensors = tuple(TensorEntry(name, "F32", (1,), 0, 4) for name in (*names, "lm_head.weight"))
    file = WeightFile(Path("model.safetensors"), 4, 0, 0, tensors)
    kept = [tensor.name for tensor in image_tensors([file], config)]
    assert kept == names[:layers] + names[4:]
