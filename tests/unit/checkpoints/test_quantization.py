"""Quantized weights: which are let through, with what reason others are refused, and their size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from appliance.checkpoints import families
from appliance.checkpoints.checkpoint import read_checkpoint
from appliance.checkpoints.families import UnsupportedModel, check_cpu, check_family
from appliance.checkpoints.model_config import read_model_config
from appliance.config.schema import Devices, Model
from appliance.config.sizing import read_model
from appliance.daemon.served_model import served_model
from appliance.scheduling.cost_model import CostModel
from appliance.units import Bytes, Memory
from tests.engine.quantizing import fp8_config, w4a16_config, w8a8_config

Make = Callable[..., Path]

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
EIGHT = {**GPTQ, "bits": 8}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
ROWS, COLUMNS = 256, 64
LAYER = "model.layers.0.block_sparse_moe.experts.0.w1"


@pytest.mark.parametrize(
    "quantization",
    [
        GPTQ,
        {**GPTQ, "group_size": 32, "checkpoint_format": "gptq_v2"},
        {**GPTQ, "group_size": -1, "desc_act": True},
        EIGHT,
        {**GPTQ, "dynamic": {"-:.*gate.*": {}, r"-:^model\.layers\.0.*$": {}}},
        AWQ,
        {**AWQ, "version": "GEMM", "modules_to_not_convert": None},
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True},
    ],
)
def test_what_is_served(fake_checkpoint: Make, quantization: dict[str, Any]) -> None:
    check_family(read_model_config(fake_checkpoint(quantization_config=quantization)))


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({**GPTQ, "bits": 3}, r"\(gptq: 3 bits, not 4 or 8, for which vLLM has no kernel on CPUs"),
        ({**GPTQ, "group_size": 16}, r"groups of 16 rows, not one of -1, 32, 64, 128"),
        ({**GPTQ, "sym": False}, "not symmetric"),
        ({**GPTQ, "desc_act": True}, "desc_act"),
        ({**GPTQ, "lm_head": True}, "the output head, too"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "stored as marlin"),
        ({**GPTQ, "bits": 4.0}, "bits is 4.0"),
        ({**GPTQ, "group_size": 128.0}, "group_size is 128.0"),
        ({**GPTQ, "sym": 1}, "sym is 1"),
        ({**GPTQ, "dynamic": {".*down.*": {"bits": 8}}}, r"the rule '\.\*down"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"group_size": 64}}}, "for some of its layers"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, "for some of its layers"),
        ({**GPTQ, "dynamic": {"-:(.*)*(.*)*x$": {}}}, "for some of its layers"),
        ({**GPTQ, "dynamic": {"-:.*a.*b.*c.*d": {}}}, "for some of its layers"),
        ({**GPTQ, "dynamic": {f"-:l{n}": {} for n in range(65)}}, "at most 64 patterns"),
        ({**GPTQ, "dynamic": ["-:.*"]}, "no table"),
        ({"quant_method": "gptq", "bits": 4}, "does not say group_size"),
        ({k: v for k, v in GPTQ.items() if k != "desc_act"}, "does not say desc_act"),
        ({**GPTQ, "modules_in_block_to_quantize": [["a"], [["b"]]]}, "_to_quantize is no list of"),
        ({**AWQ, "modules_to_not_convert": 5}, "n_config.modules_to_not_convert is no list of"),
        ({**AWQ, "modules_to_not_convert": [5]}, "modules_to_not_convert is no list of names"),
        ({**AWQ, "modules_to_not_convert": ["x"] * 4097}, "has more than 4096 names"),
        ({**AWQ, "ignore": 5}, "quantization_config.ignore is no list of names"),
        ({**AWQ, "dynamic": ["-:a"]}, "quantization_config.dynamic is no table of patterns"),
        ({"quant_method": "fp8", "ignore": "lm_head"}, "ignore is no list of names"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": [[5]]}, "is no list of names"),
        ({**w4a16_config(128), "ignore": [5]}, "quantization_config.ignore is no list of names"),
        ({**AWQ, "bits": 8}, r"\(awq: 8 bits, not 4, "),
        ({**AWQ, "zero_point": False}, "without zero points"),
        ({**AWQ, "version": "gemv"}, "stored as gemv"),
        ({"quant_method": "fp8"}, r"quantized \(fp8: quantization_config.activation_scheme"),
        ({"quant_method": "mxfp4"}, r"serves LlamaForCausalLM .* quantized \(mxfp4\)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"quantized \(bitsandbytes\)"),
        ({"quant_method": "compressed-tensors"}, "config_groups has no groups, not one"),
        ({"bits": 4}, "an unnamed method"),
    ],
)
def test_what_is_not(fake_checkpoint: Make, quantization: dict[str, Any], reason: str) -> None:
    """With the reason, and a remedy."""
    config = read_model_config(fake_checkpoint(quantization_config=quantization))

    with pytest.raises(UnsupportedModel, match=reason) as caught:
        check_family(config)

    assert caught.value.remedy.startswith("take the model's checkpoint with weights in bfloat16")


@pytest.mark.parametrize(
    ("kind", "architecture", "quantization"),
    [
        ("olmoe", "OlmoeForCausalLM", GPTQ),
        ("phi3", "Phi3ForCausalLM", EIGHT),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", EIGHT),
        ("olmoe", "OlmoeForCausalLM", w8a8_config()),
        ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", w8a8_config()),
    ],
)
def test_families_that_no_test_serves_so(
    fake_checkpoint: Make, kind: str, architecture: str, quantization: dict[str, Any]
) -> None:
    """Though they are served with plain weights, or with other numbers."""
    path = fake_checkpoint(
        architectures=[architecture], model_type=kind, quantization_config=quantization
    )

    with pytest.raises(UnsupportedModel, match=f"no test serves {architecture} .* quantized"):
        check_family(read_model_config(path))


def store(path: Path, shapes: Mapping[str, tuple[tuple[int, ...], type[np.generic]]]) -> Path:
    save_file(
        {name: np.zeros(shape, kind) for name, (shape, kind) in shapes.items()},
        path / "model.safetensors",
    )
    return path


def gptq_tensors(rows: int, columns: int, groups: int) -> dict[str, Any]:
    return {
        "l.qweight": ((rows // 8, columns), np.int32),
        "l.qzeros": ((groups, columns // 8), np.int32),
        "l.scales": ((groups, columns), np.float16),
        "l.g_idx": ((rows,), np.int32),
        "l.bias": ((columns,), np.float16),
    }


def awq_tensors(rows: int, columns: int, groups: int) -> dict[str, Any]:
    return {
        "l.qweight": ((rows, columns // 8), np.int32),
        "l.qzeros": ((groups, columns // 8), np.int32),
        "l.scales": ((groups, columns), np.float16),
    }


def test_sizes_are_those_of_what_the_kernel_reads(fake_checkpoint: Make) -> None:
    """GPTQ's zero points, the order of its groups, and a bias that may be none are not. The number
    of parameters counts weights, not the words that they are in."""
    groups = ROWS // 128
    words, scales, zeros = ROWS * COLUMNS // 2, groups * COLUMNS * 2, groups * COLUMNS // 2
    gptq = store(
        fake_checkpoint("g", quantization_config=GPTQ), gptq_tensors(ROWS, COLUMNS, groups)
    )
    awq = store(fake_checkpoint("a", quantization_config=AWQ), awq_tensors(ROWS, COLUMNS, groups))

    one, other = read_checkpoint("g", gptq), read_checkpoint("a", awq)

    assert one.weight_bytes == words + scales
    assert other.weight_bytes == words + scales + zeros
    assert one.parameters == other.parameters + COLUMNS == ROWS * COLUMNS + COLUMNS


@pytest.mark.parametrize(
    ("quantization", "tensors"),
    [
        (GPTQ, gptq_tensors(ROWS, COLUMNS, 2)),
        (AWQ, awq_tensors(ROWS, COLUMNS, 2)),
        (
            {**w4a16_config(128, symmetric=False), "ignore": ["lm_head"]},
            {
                f"{LAYER}.weight_packed": ((COLUMNS, ROWS // 8), np.int32),
                f"{LAYER}.weight_scale": ((COLUMNS, 2), np.float16),
                f"{LAYER}.weight_zero_point": ((COLUMNS // 8, 2), np.int32),
                f"{LAYER}.weight_shape": ((2,), np.int64),
            },
        ),
        (
            w8a8_config(),
            {
                f"{LAYER}.weight": ((COLUMNS, ROWS), np.int8),
                f"{LAYER}.weight_scale": ((COLUMNS, 1), np.float32),
            },
        ),
    ],
)
def test_sizes_with_experts_are_those_of_the_products(
    fake_checkpoint: Make, quantization: dict[str, Any], tensors: dict[str, Any]
) -> None:
    """In any type, also float32; nothing else of the layers is kept."""
    path = store(
        fake_checkpoint(
            architectures=["MixtralForCausalLM"],
            model_type="mixtral",
            quantization_config=quantization,
        ),
        tensors,
    )

    two, four = read_checkpoint("a", path, "bfloat16"), read_checkpoint("a", path, "float32")

    assert (two.weight_bytes, four.weight_bytes) == (2 * ROWS * COLUMNS, 4 * ROWS * COLUMNS)
    assert two.parameters == ROWS * COLUMNS
    assert two.multiplied == quantization["quant_method"]


@pytest.mark.parametrize(
    "changed", [{"scales": ((2, COLUMNS), np.int16)}, {"qzeros": ((2, COLUMNS // 8), np.int64)}]
)
def test_types_that_no_products_are_made_of(fake_checkpoint: Make, changed: dict[str, Any]) -> None:
    """Names in the list of AWQ are parts of others: routers that are not quantized."""
    config = fake_checkpoint(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        quantization_config={**AWQ, "modules_to_not_convert": ["l"]},
    )
    tensors = awq_tensors(ROWS, COLUMNS, 2)
    read_checkpoint("tiny", store(config, tensors))
    store(config, {**tensors, **{f"l.{own}": tensor for own, tensor in changed.items()}})

    with pytest.raises(UnsupportedModel, match=r"l\.qweight lacks scales or zeros"):
        read_checkpoint("tiny", config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({f"{LAYER}.scales": ((COLUMNS, 4), np.float16)}, r"w1\.scales is there, which compr"),
        ({"model.layers.0.q.qweight": ((COLUMNS, 8), np.int32)}, r"q\.qweight is there, which c"),
        ({f"{LAYER}.weight_packed": ((2, COLUMNS, 8), np.int32)}, "is no matrix of I32"),
        ({f"{LAYER}.weight_scale": ((2, COLUMNS, 2), np.float16)}, "is not there with the shape"),
    ],
)
def test_tensors_of_another_method(
    fake_checkpoint: Make, changes: dict[str, Any], reason: str
) -> None:
    """Or that are no matrices: products are made of what was checked."""
    path = fake_checkpoint(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        quantization_config=w4a16_config(128) | {"ignore": ["lm_head"]},
    )
    tensors: dict[str, Any] = {
        f"{LAYER}.weight_packed": ((COLUMNS, ROWS // 8), np.int32),
        f"{LAYER}.weight_scale": ((COLUMNS, 2), np.float16),
    }
    read_checkpoint("tiny", store(path, tensors))
    store(path, tensors | changes)

    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint("tiny", path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({f"{LAYER}.weight": ((COLUMNS, ROWS), np.uint8)}, "is no matrix of I8"),
        ({f"{LAYER}.weight_scale": ((COLUMNS, 2), np.float16)}, "is not there with the shape"),
        ({f"{LAYER}.weight_packed": ((COLUMNS, 8), np.int32)}, "w1.weight_packed is there"),
        ({"model.layers.0.q.qweight": ((COLUMNS, 8), np.int32)}, r"q\.qweight is there, which c"),
        ({f"{LAYER}.input_scale": ((1,), np.float32)}, "input_scale is there"),
    ],
)
def test_experts_in_eight_bits_of_other_tensors(
    fake_checkpoint: Make, changes: dict[str, Any], reason: str
) -> None:
    path = fake_checkpoint(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        quantization_config=w8a8_config(),
    )
    tensors: dict[str, Any] = {
        f"{LAYER}.weight": ((COLUMNS, ROWS), np.int8),
        f"{LAYER}.weight_scale": ((COLUMNS, 1), np.float32),
    }
    read_checkpoint("tiny", store(path, tensors))
    store(path, tensors | changes)

    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint("tiny", path)


def test_eight_bits_take_the_room_of_their_products(fake_checkpoint: Make) -> None:
    """Four are in a word."""
    groups = ROWS // 128
    shapes = {
        "l.qweight": ((ROWS // 4, COLUMNS), np.int32),
        "l.qzeros": ((groups, COLUMNS // 4), np.int32),
        "l.scales": ((groups, COLUMNS), np.float16),
        "l.g_idx": ((ROWS,), np.int32),
    }
    path = store(fake_checkpoint(quantization_config=EIGHT, torch_dtype="bfloat16"), shapes)

    found = read_checkpoint("tiny", path, "bfloat16")

    assert found.parameters == ROWS * COLUMNS
    assert found.weight_bytes == 2 * ROWS * COLUMNS


@pytest.mark.parametrize("quantization", [GPTQ, AWQ])
def test_tensors_of_compressed_tensors_with_another_method(
    fake_checkpoint: Make, quantization: dict[str, Any]
) -> None:
    """Also beside the layer's own."""
    path = fake_checkpoint(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        quantization_config=quantization,
    )
    method = quantization["quant_method"]
    make = gptq_tensors if method == "gptq" else awq_tensors
    for own in ("weight_packed", "weight_scale", "weight_zero_point"):
        store(path, make(ROWS, COLUMNS, 2) | {f"l.{own}": ((4, 64, 8), np.int32)})

        with pytest.raises(UnsupportedModel, match=rf"l\.{own} is there, which {method} does"):
            read_checkpoint("tiny", path)


def test_the_estimate_of_a_switch_is_of_what_the_kernel_reads(
    fake_checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the bytes of bfloat16, and the factors."""
    monkeypatch.setattr(families, "computes_four_bits", lambda: True)
    tensors = gptq_tensors(4096, 256, 32)
    quantized = store(fake_checkpoint("a", quantization_config=GPTQ), tensors)
    plain = store(fake_checkpoint("b"), {"l.weight": ((256, 4096), np.float16)})
    models = [
        Model(name=path.name, path=str(path), dtype="bfloat16", max_context=64)
        for path in (quantized, plain)
    ]
    devices = Devices(kind="cpu", memory_bytes=Memory(8 << 20), slab_bytes=Bytes(2 << 20))
    specs = [served_model(model, read_model(model, devices)).spec for model in models]

    costs = CostModel(specs)

    seconds = [costs.switch_seconds(model.name) for model in models]
    assert seconds[0] / seconds[1] == pytest.approx(1 / 4 + 1 / 128)


@pytest.mark.parametrize(
    ("quantization", "tensors", "reason"),
    [
        (GPTQ, gptq_tensors(ROWS, 48, 2), "l.qweight has 256 rows and 48 columns"),
        (AWQ, awq_tensors(ROWS, 48, 2), "l.qweight has 256 rows and 48 columns"),
        (AWQ, awq_tensors(16, COLUMNS, 1), "16 rows and 64 columns, which are no multiples of 32"),
        (GPTQ, gptq_tensors(192, COLUMNS, 2), "no multiple of its groups of 128"),
        (None, gptq_tensors(ROWS, COLUMNS, 2), "l.qweight is quantized, and config.json does not"),
        (GPTQ, gptq_tensors(ROWS, COLUMNS, 4), r"l.scales is not there with the shape \[2, 64\]"),
        (AWQ, gptq_tensors(ROWS, COLUMNS, 2), "32 rows, which are no multiple of its groups"),
        (GPTQ, gptq_tensors(0, COLUMNS, 0), "0 rows and 64 columns"),
        (
            GPTQ,
            {**gptq_tensors(ROWS, COLUMNS, 2), "l.qweight": ((ROWS // 8, COLUMNS), np.int64)},
            "no matrix of 32-bit words",
        ),
        (
            GPTQ,
            {f"lm_head.{n[2:]}": t for n, t in gptq_tensors(ROWS, COLUMNS, 2).items()},
            "is the output head",
        ),
        (
            {**AWQ, "modules_to_not_convert": ["l."]},
            awq_tensors(ROWS, COLUMNS, 2),
            "config.json says that it is not",
        ),
        (
            AWQ,
            {
                **{f"a.q_proj.{n[2:]}": t for n, t in awq_tensors(ROWS, COLUMNS, 2).items()},
                "a.k_proj.weight": ((ROWS, COLUMNS), np.float16),
            },
            "a.q_proj.qweight is quantized, and a.k_proj is not",
        ),
    ],
)
def test_tensors_that_the_kernel_does_not_take(
    fake_checkpoint: Make,
    quantization: dict[str, Any] | None,
    tensors: dict[str, Any],
    reason: str,
) -> None:
    path = store(fake_checkpoint(quantization_config=quantization), tensors)

    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint("tiny", path)


@pytest.mark.parametrize(
    ("kind", "dtype", "ranks", "reason"),
    [
        ("cpu", "float32", 1, "computed in bfloat16 or float16, not float32"),
        ("cuda", "bfloat16", 1, r"quantized \(awq\), which was only tried on the CPU"),
        ("cpu", "bfloat16", 2, "not served by several ranks"),
    ],
)
def test_where_they_are_not_served(
    fake_checkpoint: Make,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    dtype: Any,
    ranks: int,
    reason: str,
) -> None:
    monkeypatch.setattr(families, "computes_four_bits", lambda: True)
    path = store(fake_checkpoint(quantization_config=AWQ), awq_tensors(ROWS, COLUMNS, 2))
    devices = Devices(
        kind=kind,
        tensor_parallel=ranks,
        memory_bytes=Memory(8 << 20),
        slab_bytes=Bytes(2 << 20),
    )

    with pytest.raises(UnsupportedModel, match=reason):
        read_model(Model(name="a", path=str(path), dtype=dtype, max_context=64), devices)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", [GPTQ, AWQ, w4a16_config(32)])
def test_weights_in_4_bits_want_certain_instructions(
    fake_checkpoint: Make, monkeypatch: pytest.MonkeyPatch, quantization: dict[str, Any], dtype: str
) -> None:
    config = read_model_config(fake_checkpoint(quantization_config=quantization))
    monkeypatch.setattr(families, "computes_four_bits", lambda: True)
    check_cpu(config, "bfloat16")
    monkeypatch.setattr(families, "computes_four_bits", lambda: False)

    with pytest.raises(
        UnsupportedModel, match=r"lacks the instructions \(avx512f.* 4 bits"
    ) as told:
        check_cpu(config, dtype)

    assert "bfloat16 or float16, or in 8 bits" in told.value.remedy


@pytest.mark.parametrize(
    ("quantization", "changes"),
    [
        (w8a8_config(), {}),
        (fp8_config((128, 128)), {}),
        (EIGHT, {}),
        (GPTQ, {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}),
        (None, {}),
    ],
)
def test_other_weights_do_not(
    fake_checkpoint: Make,
    monkeypatch: pytest.MonkeyPatch,
    quantization: dict[str, Any] | None,
    changes: dict[str, Any],
) -> None:
    """Also those of which the products are computed with."""
    monkeypatch.setattr(families, "computes_four_bits", lambda: False)

    check_cpu(
        read_model_config(fake_checkpoint(quantization_config=quantization, **changes)), "bfloat16"
    )
