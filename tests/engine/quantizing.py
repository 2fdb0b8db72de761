"""Quantizes the linear layers of small checkpoints, as GPTQ, AWQ and llm-compressor store them.

``python -m tests.engine.quantizing FOLDER NAME…`` makes the checkpoints of these models
(`tests.configs`), not quantized yet. vLLM replaces some classes of transformers that it has built a
model of, so that a process can make no more checkpoints with them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from appliance.checkpoints.language_models import MEDIA
from appliance.checkpoints.quantized.integers import NUMBERS, per_word
from appliance.platform.cpus import computes_four_bits
from tests.configs import CONFIGS, SPARSE
from tests.engine.shrunken import make_shrunken

if TYPE_CHECKING:
    import torch

AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours lies in each four bits of a word."""
IN_ORDER: Final = tuple(range(8))
_TOWERS: Final = frozenset(part for media in MEDIA.values() for part in media.towers)


def gptq_config(group: int, **changes: Any) -> dict[str, Any]:
    """What a checkpoint of GPTQ says of itself."""
    told = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    return {**told, **changes}


def awq_config(group: int, **changes: Any) -> dict[str, Any]:
    """What a checkpoint of AWQ says of itself."""
    told = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return {**told, "version": "gemm", **changes}


def w4a16_config(group: int, **changes: Any) -> dict[str, Any]:
    """What llm-compressor says of weights in 4 bits; `changes` are of the weights."""
    strategy: dict[str, Any] = {"strategy": "group", "group_size": group}
    if group < 0:
        strategy = {"strategy": "channel", "group_size": None}
    return _compressed("pack-quantized", {"num_bits": 4, **strategy, **changes}, None)


def w8a8_config() -> dict[str, Any]:
    """The same of weights and activations in 8 bits."""
    inputs = {"num_bits": 8, "strategy": "token", "type": "int", "symmetric": True, "dynamic": True}
    return _compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}, inputs)


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    whole = {"type": "int", "symmetric": True, "dynamic": False, "observer": "minmax", **weights}
    group = {"targets": ["Linear"], "weights": whole, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "kv_cache_scheme": None,
        "sparsity_config": {"format": "dense", "targets": [], "ignore": []},
    }


def why_not_computed(config: dict[str, Any]) -> str:
    """Why plain vLLM does not compute with linear layers that are stored so on this machine's CPU,
    or not rightly; "" if it does."""
    if per_word(config) == NUMBERS and not computes_four_bits():
        return "vLLM has no kernel for weights in 4 bits without avx512"
    return SATURATES if per_word(config) == 1 and saturates() else ""


SATURATES: Final = "without VNNI, sums of vLLM's kernel for W8A8 saturate"


def saturates() -> bool:
    """Whether oneDNN adds pairs of products of 8-bit numbers in 16 bits, as the CPU has no
    instruction for more."""
    return not re.search(r"\bavx(512)?_vnni\b", Path("/proc/cpuinfo").read_text(encoding="ascii"))


def skip_uncomputed(config: dict[str, Any]) -> None:
    """Skip a test that compares with what plain vLLM does not compute."""
    import pytest

    if why := why_not_computed(config):
        pytest.skip(why)


def quantize(path: str, config: dict[str, Any], dtype: str = "bfloat16") -> None:
    """Rewrite the checkpoint: linear layers as `config` says, the rest in `dtype`. GPTQ's tools
    store a bias of zeros where a layer has none."""
    import torch
    from safetensors.torch import load_file, save_file

    file, settings = Path(path) / "model.safetensors", Path(path) / "config.json"
    method = config["quant_method"]
    gptq = partial(_gptq, bits=config.get("bits", 4))
    store = {"gptq": gptq, "awq": _awq}.get(method) or _compress(config)
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(file).items():
        stem = name.removesuffix("weight")
        # Routers of a few experts are no layer that tools quantize.
        layer = values.ndim == 2 and re.search(r"\.\d+\.", name) and values.shape[0] % 32 == 0
        if layer and not _is_left(stem[:-1], config):
            group = config.get("group_size", -1)
            made = store(values.float().t(), group if group > 0 else values.shape[1])
            tensors |= {f"{stem}{own}": tensor.contiguous() for own, tensor in made.items()}
            if method == "gptq":
                tensors.setdefault(f"{stem}bias", torch.zeros(values.shape[0]))
        else:
            tensors[name] = values
    wanted = getattr(torch, dtype)
    floats = {n: t.to(wanted) if t.is_floating_point() else t for n, t in tensors.items()}
    save_file(floats, file, metadata={"format": "pt"})
    read = json.loads(settings.read_text())
    read.pop("dtype", None)
    settings.write_text(json.dumps({**read, "torch_dtype": dtype, "quantization_config": config}))


def multiply(path: str, multiplied: str) -> None:
    """Write the products of a quantized checkpoint's layers, in float32, to the one at
    `multiplied`."""
    import torch
    from safetensors.torch import load_file, save_file

    settings = json.loads((Path(path) / "config.json").read_text())
    config = settings.pop("quantization_config")
    method, bits = config["quant_method"], config.get("bits", 4)
    stored = load_file(Path(path) / "model.safetensors")
    products = {}
    for name, tensor in stored.items():
        stem = name.rpartition(".")[0]
        if tensor.dtype == torch.int8:
            products[name] = tensor.float() * stored[f"{name}_scale"].float()
        elif name.endswith((".qweight", ".weight_packed")):
            scales = stored[f"{stem}.{'weight_scale' if 'packed' in name else 'scales'}"].float()
            if method == "gptq":
                numbers = _numbers(tensor, 0, IN_ORDER[: 32 // bits])
                zeros = torch.full_like(scales, 1 << (bits - 1))
            elif method == "awq":
                numbers = _numbers(tensor, 1, AWQ_ORDER)
                zeros = _numbers(stored[f"{stem}.qzeros"], 1, AWQ_ORDER)
            else:
                scales, numbers = scales.t(), _numbers(tensor, 1, IN_ORDER).t()
                zeros = torch.full_like(scales, 8)
                if f"{stem}.weight_zero_point" in stored:
                    zeros = _numbers(stored[f"{stem}.weight_zero_point"], 0, IN_ORDER).t()
            rows = len(numbers) // len(scales)
            zeros, scales = (one.repeat_interleave(rows, 0) for one in (zeros, scales))
            products[f"{stem}.weight"] = ((numbers - zeros) * scales).t().contiguous()
        elif not name.endswith(_FACTORS) and not (".experts." in name and name.endswith(".bias")):
            products[name] = tensor
    (Path(multiplied) / "config.json").write_text(json.dumps(settings))
    save_file(products, Path(multiplied) / "model.safetensors", metadata={"format": "pt"})


_FACTORS: Final = (".scales", ".qzeros", ".g_idx", "_scale", "_shape", "_zero_point")


def _numbers(words: torch.Tensor, dimension: int, order: tuple[int, ...]) -> torch.Tensor:
    """The numbers in words: what `_words` made them of."""
    import torch

    bits = 32 // len(order)
    places = [
        (words >> (bits * order.index(neighbour))) & ((1 << bits) - 1)
        for neighbour in range(len(order))
    ]
    return torch.stack(places, dimension + 1).flatten(dimension, dimension + 1)


def fp8_config(block: tuple[int, int] | None, **changes: Any) -> dict[str, Any]:
    """What a checkpoint says of weights in floats of 8 bits."""
    told = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return {**told, **({"weight_block_size": list(block)} if block else {}), **changes}


def float_quantized_config(strategy: str, **changes: Any) -> dict[str, Any]:
    """What llm-compressor says of weights in floats of 8 bits; `changes` are of the weights."""
    inputs = {"num_bits": 8, "strategy": "token", "type": "float", "dynamic": True}
    weights = {"num_bits": 8, "strategy": strategy, "type": "float", **changes}
    return _compressed("float-quantized", weights, {**inputs, "symmetric": True})


def to_floats(
    path: str, multiplied: str, block: tuple[int, int] | None, config: dict[str, Any] | None = None
) -> None:
    """Rewrite the checkpoint with linear layers in floats of 8 bits, with a factor for each block
    or each matrix, or for each row if `config` says so, and the one at `multiplied` with their
    products in float32."""
    by_row = bool(config) and block is None
    import torch
    from safetensors.torch import load_file, save_file

    stored: dict[str, torch.Tensor] = {}
    products: dict[str, torch.Tensor] = {}
    for name, values in load_file(Path(path) / "model.safetensors").items():
        stored[name] = products[name] = values.to(torch.bfloat16)
        if values.ndim != 2 or not re.search(r"\.\d+\.", name) or ".gate." in name or _reads(name):
            continue
        rows, columns = values.shape
        high, wide = block or (1 if by_row else rows, columns)
        down, across = -(-rows // high), -(-columns // wide)
        padded = torch.zeros(down * high, across * wide)
        padded[:rows, :columns] = values
        factors = padded.view(down, high, across, wide).abs().amax((1, 3)) / 448
        spread = factors.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
        stored[name] = (values / spread).to(torch.float8_e4m3fn)
        own = name + ("_scale_inv" if block and not config else "_scale")
        stored[own] = factors if block or by_row else factors.view(1)
        products[name] = stored[name].float() * spread
    for folder, tensors in ((path, stored), (multiplied, products)):
        settings = Path(folder) / "config.json"
        read = {**json.loads(settings.read_text()), "torch_dtype": "bfloat16"}
        read.pop("dtype", None)
        if tensors is stored:
            read["quantization_config"] = config or fp8_config(block)
        settings.write_text(json.dumps(read))
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def mxfp4_config() -> dict[str, Any]:
    """What gpt-oss says of its weights."""
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    return {"quant_method": "mxfp4", "modules_to_not_convert": left}


def to_microscaled(path: str, multiplied: str) -> None:
    """Rewrite the checkpoint of a gpt-oss with experts in MXFP4, any bits, and the one at
    `multiplied` with what transformers makes of them. Blocks and scales lie in files of their
    own."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    dice = torch.Generator().manual_seed(0)
    plain: dict[str, torch.Tensor] = {}
    blocks: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    products: dict[str, torch.Tensor] = {}
    for name, values in load_file(Path(path) / "model.safetensors").items():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            plain[name] = values.to(torch.bfloat16)
            continue
        experts, rows, columns = values.shape
        shape = (experts, columns, rows // 32)
        one = torch.randint(0, 256, (*shape, 16), generator=dice, dtype=torch.uint8)
        other = torch.randint(119, 126, shape, generator=dice, dtype=torch.uint8)
        blocks[f"{name}_blocks"], scales[f"{name}_scales"] = one, other
        products[name] = convert_moe_packed_tensors(one, other).contiguous()
        assert products[name].shape == values.shape
    stored = {"model": plain, "blocks": blocks, "a-scales": scales}
    for folder, files in ((path, stored), (multiplied, {"model": plain | products})):
        settings = Path(folder) / "config.json"
        read = {**json.loads(settings.read_text()), "torch_dtype": "bfloat16"}
        read.pop("dtype", None)
        if folder == path:
            read["quantization_config"] = mxfp4_config()
        settings.write_text(json.dumps(read))
        for own, tensors in files.items():
            save_file(tensors, Path(folder) / f"{own}.safetensors", metadata={"format": "pt"})


def modelopt_config(*, apart: bool = False) -> dict[str, Any]:
    """What ModelOpt says of weights in NVFP4, also of those in a file `apart`: keys and values
    are to be floats of 8 bits."""
    algorithm = {"quant_algo": "NVFP4", "group_size": 16}
    if apart:
        own = {**algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        return {"producer": {"name": "modelopt"}, "quantization": own}
    numbers = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    group = {"weights": numbers, "input_activations": numbers, "targets": ["Linear"]}
    cache = {"num_bits": 8, "type": "float", "dynamic": False}
    told = {"quant_method": "modelopt", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {**told, **algorithm, "kv_cache_scheme": cache}


def nvfp4_config() -> dict[str, Any]:
    """The same as llm-compressor says it, without keys and values."""
    numbers = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    inputs = {**numbers, "dynamic": "local", "symmetric": True}
    return _compressed("nvfp4-pack-quantized", numbers, inputs)


def to_nvfp4(path: str, multiplied: str, config: dict[str, Any]) -> None:
    """Rewrite the checkpoint with linear layers in NVFP4, but for those that ModelOpt's `config`
    has in its list, and the one at `multiplied` with what
    vLLM's emulation for GPUs makes of them, in float32."""
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from safetensors.torch import load_file, save_file
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
        dequantize_to_dtype,
    )

    compressed = config.get("quant_method") == "compressed-tensors"
    stored: dict[str, torch.Tensor] = {}
    products: dict[str, torch.Tensor] = {}
    for name, values in load_file(Path(path) / "model.safetensors").items():
        plain = values.to(torch.bfloat16)
        stored[name] = products[name] = plain
        left = any(fnmatch(name, pattern) for pattern in config.get("ignore", ()))
        if values.ndim != 2 or not re.search(r"\.\d+\.", name) or "gate." in name or left:
            continue
        blocks = values.float().unflatten(1, (-1, 16))
        whole = values.abs().max().float() / (448 * 6)
        divisor = 1.0 / whole
        if compressed:
            whole = 1.0 / divisor
        factors = (blocks.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
        scaled = blocks / (factors.float() * whole).clamp(min=1e-9)[..., None]
        packed = pack_fp4_to_uint8(scaled.flatten(1))
        stem = name.removesuffix(".weight")
        del stored[name]
        stored |= {f"{stem}.weight_scale": factors}
        if compressed:
            stored |= {f"{stem}.weight_packed": packed, f"{stem}.input_global_scale": torch.ones(1)}
            stored[f"{stem}.weight_global_scale"] = divisor.view(1)
        else:
            stored |= {f"{stem}.weight": packed, f"{stem}.weight_scale_2": whole}
            stored[f"{stem}.input_scale"] = torch.tensor(1.0)
            if stem.endswith(("k_proj", "v_proj")):
                stored[f"{stem}.{stem[-6]}_scale"] = torch.tensor(0.5)
        products[name] = dequantize_to_dtype(packed, factors, whole, torch.float32, swizzle=False)
    for folder, tensors in ((path, stored), (multiplied, products)):
        settings = Path(folder) / "config.json"
        read = {**json.loads(settings.read_text()), "torch_dtype": "bfloat16"}
        read.pop("dtype", None)
        if folder == path and "quantization" in config:
            (Path(folder) / "hf_quant_config.json").write_text(json.dumps(config))
        elif folder == path:
            read["quantization_config"] = config
        settings.write_text(json.dumps(read))
        whole_tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole_tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})


def _is_left(layer: str, config: dict[str, Any]) -> bool:
    """Whether a layer is not quantized, as the configuration says; what reads images never is."""
    if _reads(layer):
        return True
    patterns = [name for name in config.get("dynamic", ()) if name.startswith("-:")]
    patterns += [name.replace("re:", "-:") for name in config.get("ignore", ())]
    return any(part in layer for part in config.get("modules_to_not_convert", ())) or any(
        re.match(pattern.removeprefix("-:"), layer) for pattern in patterns
    )


def _reads(name: str) -> bool:
    """Whether it is a part of what reads images."""
    return not _TOWERS.isdisjoint(name.split("."))


def _gptq(weight: torch.Tensor, group: int, *, bits: int) -> dict[str, torch.Tensor]:
    """Of a weight ``[in, out]``: symmetric, eight rows in a word, or four."""
    import torch

    rows, columns = weight.shape
    groups = weight.reshape(rows // group, group, columns)
    middle = 1 << (bits - 1)
    scales = groups.abs().amax(1) / (middle - 1)
    numbers = (groups / scales[:, None]).round().clamp(-middle, middle - 1).to(torch.int64) + middle
    zeros = 0x77777777 if bits == 4 else 0x7F7F7F7F
    order = IN_ORDER[: 32 // bits]
    return {
        "qweight": _words(numbers.reshape(rows, columns), 0, order),
        "qzeros": torch.full((rows // group, columns * bits // 32), zeros, dtype=torch.int32),
        "scales": scales,
        "g_idx": (torch.arange(rows) // group).to(torch.int32),
    }


def _awq(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Of a weight ``[in, out]``: with zero points, eight columns in a word."""
    import torch

    rows, columns = weight.shape
    groups = weight.reshape(rows // group, group, columns)
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = (high - low) / 15
    zeros = (-low / scales).round().clamp(0, 15).to(torch.int64)
    numbers = ((groups / scales[:, None]).round() + zeros[:, None]).clamp(0, 15).to(torch.int64)
    return {
        "qweight": _words(numbers.reshape(rows, columns), 1, AWQ_ORDER),
        "qzeros": _words(zeros, 1, AWQ_ORDER),
        "scales": scales,
    }


def _compress(config: dict[str, Any]) -> Callable[[torch.Tensor, int], dict[str, torch.Tensor]]:
    """As llm-compressor stores a weight: of rows ``[out, in]``."""
    (group,) = config["config_groups"].values()
    weights = group["weights"]

    def store(weight: torch.Tensor, rows: int) -> dict[str, torch.Tensor]:
        import torch

        most = 2 ** (weights["num_bits"] - 1) - 1
        grouped = weight.t().reshape(weight.shape[1], -1, weights.get("group_size") or rows)
        scale = grouped.abs().amax(2, keepdim=True) / most
        zeros = torch.zeros_like(scale)
        if not weights["symmetric"]:
            low = grouped.amin(2, keepdim=True)
            scale = (grouped.amax(2, keepdim=True) - low) / (2 * most + 1)
            zeros = (-most - 1 - low / scale).round().clamp(-most - 1, most)
        numbers = (grouped / scale + zeros).round().clamp(-most - 1, most).flatten(1)
        if weights["num_bits"] == 8:
            return {"weight": numbers.to(torch.int8), "weight_scale": scale[..., 0]}
        made = {
            "weight_packed": _words(numbers.to(torch.int64) + 8, 1, IN_ORDER),
            "weight_scale": scale[..., 0],
            "weight_shape": torch.tensor(numbers.shape),
        }
        if not weights["symmetric"]:
            words = _words(zeros[..., 0].to(torch.int64) + 8, 0, IN_ORDER)
            made["weight_zero_point"] = words
        return made

    return store


def _words(numbers: torch.Tensor, dimension: int, order: tuple[int, ...]) -> torch.Tensor:
    """Neighbours along a dimension, in each word: eight numbers of four bits, or four of eight."""
    import torch

    many, bits = numbers.movedim(dimension, -1).unflatten(-1, (-1, len(order))), 32 // len(order)
    packed = sum(many[..., source] << (bits * place) for place, source in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return packed.movedim(-1, dimension).to(torch.uint32).view(torch.int32)


def make_plain(folder: Path, names: Iterable[str]) -> None:
    """Write small checkpoints that are not quantized, in a process of its own."""
    command = [sys.executable, "-m", "tests.engine.quantizing", str(folder)]
    subprocess.run([*command, *names], check=True, capture_output=True)


if __name__ == "__main__":
    for made in sys.argv[2:]:
        make_shrunken(Path(sys.argv[1]), made, {**CONFIGS, **SPARSE}[made])
