"""Products with weights of 8 bits as they are stored: bit for bit those of vLLM's own kernel."""

from __future__ import annotations

import pytest
import torch
import vllm._custom_ops as ops
from vllm.platforms import current_platform

from appliance.engines.vllm.weights.int8 import ROWS, multiply
from tests.engine.quantizing import SATURATES, saturates

current_platform.import_kernels()


@pytest.mark.skipif(saturates(), reason=SATURATES)
@pytest.mark.parametrize("rows", [1, 5, 2 * ROWS + 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_vllms_kernel(rows: int, biased: bool, dtype: torch.dtype) -> None:
    """Also of sums that float32 does not hold exactly, and of rows of zeros."""
    dice = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (96, 4096), dtype=torch.int8, generator=dice)
    weight[:8] = 127
    scale = torch.rand(96, 1, generator=dice) * 0.01
    x = torch.randn(rows, 4096, generator=dice).to(dtype)
    x[0, 1:] = x[0, 0]
    x[-1, :] *= rows == 1
    bias = torch.randn(96, generator=dice).to(dtype) if biased else None
    handler = ops.create_onednn_scaled_mm(weight.t(), scale, dtype, True, False, 32)
    numbers, scales, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
    expected = torch.empty(rows, 96, dtype=dtype)
    ops.onednn_scaled_mm(handler, numbers, expected, scales, None, None, bias)

    found = multiply(x, weight, scale, bias)

    assert torch.equal(found, expected)
    assert torch.equal(multiply(x[None], weight, scale, bias), expected[None])


@pytest.mark.parametrize("rows", [1, 40])
def test_sums_are_exact(rows: int) -> None:
    """Also where those of vLLM's kernel saturate: of the largest numbers."""
    weight = torch.full((96, 512), 127, dtype=torch.int8)
    weight[1::2, ::3] = -128
    x = torch.ones(rows, 512, dtype=torch.float16)
    numbers, scales, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
    scale = torch.full((96, 1), 2.0**-8)

    found = multiply(x, weight, scale, None)

    sums = numbers.long() @ weight.long().t()
    assert torch.equal(found, (sums.float() * 2.0**-8 * scales).half())
