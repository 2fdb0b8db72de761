"""Linear layers of 8-bit weights (W8A8), multiplied as they are stored.

vLLM's CPU kernel has oneDNN pack such weights into memory of oneDNN's own, which could be neither
unmapped nor shared. Here they stay in the region, as the checkpoint has them, and a product is
computed in the same steps:

    rows of x        -> numbers of 8 bits and a scale for each row   vLLM's own operation
    times weights    -> sums of 32 bits                              exact in any order
    times scales     -> (sum * column's scale) * row's scale + bias  rounded as vLLM's kernel rounds

so that results are bit for bit those of vLLM's kernel, at about its speed.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
import vllm._custom_ops as ops
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsKVCacheMethod,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Int8,
)

ROWS: Final = 256
"""Rows of input that are multiplied at a time: their sums lie in memory that is not counted."""


class StoredInt8Linear(LinearMethodBase):  # type: ignore[misc]
    """What vLLM calls to compute such a layer: `weight` int8 ``[out, in]``, `weight_scale` float32
    ``[out, 1]``."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """vLLM's own method made them."""
        raise NotImplementedError("the layer has its weights")

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x @ weight.T + bias``, in the type of `x`."""
        layer_: Any = layer
        return multiply(x, layer_.weight, layer_.weight_scale, bias)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product of rows `x` with a `weight` int8 ``[out, in]``, of which each row has a `scale`
    (float32 ``[out, 1]``)."""
    rows = x.reshape(-1, x.shape[-1])
    numbers, row_scales, _ = ops.onednn_scaled_int8_quant(rows, None, None, True)
    output = x.new_empty((len(rows), len(weight)))
    column_scales, columns = scale.view(1, -1), weight.t()
    for first in range(0, len(rows), ROWS):
        part = slice(first, first + ROWS)
        sums = torch._int_mm(numbers[part], columns).float().mul_(column_scales)
        if bias is None:
            sums.mul_(row_scales[part])
        else:  # rounded once, behind the sum: a product of two float32 is exact in float64
            sums = sums.double().mul_(row_scales[part]).add_(bias).float()
        if x.dtype is torch.bfloat16 and _cuts():
            sums.view(torch.int32).bitwise_and_(~0xFFFF)
        output[part] = sums
    return output.view(*x.shape[:-1], len(weight))


@cache
def _cuts() -> bool:
    """Whether vLLM's kernel cuts numbers to bfloat16 instead of rounding them, as it does where the
    processor has no instruction for it (avx512_bf16). Asked of the kernel: 1 + 3/512 would be
    rounded up."""
    weight = torch.ones(32, 64, dtype=torch.int8)
    scale = torch.full((32, 1), (1 + 3 / 512) / 64)
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    handler = ops.create_onednn_scaled_mm(weight.t(), scale, x.dtype, True, False, 32)
    numbers, row_scales, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
    output = x.new_empty((1, 32))
    ops.onednn_scaled_mm(handler, numbers, output, row_scales, None, None, None)
    return bool(output[0, 0] == 1)


def compute_as_stored(model: torch.nn.Module) -> None:
    """Have vLLM compute layers of 8-bit weights without packing them, and settle the scales of a KV
    cache that is not quantized. To be called when all tensors are loaded."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if type(method) is CompressedTensorsLinearMethod and _is_dynamic(layer):
            _keep_as_stored(layer)
        elif type(method) is CompressedTensorsKVCacheMethod:
            # The checkpoint has none: all are 1, which vLLM reads from parameters and removes.
            method.process_weights_after_loading(layer)
            method.process_weights_after_loading = _is_done


def _is_done(layer: torch.nn.Module) -> None:
    """What vLLM calls of a layer that is done."""


def _is_dynamic(layer: Any) -> bool:
    """Whether activations are rounded by a scale of each token, without zero points."""
    scheme = layer.scheme
    return (
        type(scheme) is CompressedTensorsW8A8Int8
        and type(scheme.kernel) is CPUInt8ScaledMMLinearKernel
        and scheme.strategy == "channel"
        and not scheme.is_static_input_scheme
        and scheme.input_symmetric is True
    )


def _keep_as_stored(layer: Any) -> None:
    for name in ("weight", "weight_scale"):
        data = getattr(layer, name).data
        layer._parameters[name] = torch.nn.Parameter(data, requires_grad=False)
    layer.quant_method = StoredInt8Linear()
