"""The kernels on a GPU against their references in PyTorch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from appliance.kernels import exp7, reference
from appliance.kernels.loader import Kernels


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels()


def noise(nbytes: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 255, 4096, 100_003, (64 << 20) + 5, 1 << 30])
def test_fingerprint(kernels: Kernels, nbytes: int) -> None:
    """The same number as the reference's, on the device and on the host."""
    data = noise(nbytes)
    torch.cuda.synchronize()
    seen = kernels.fingerprint(data.data_ptr(), nbytes)

    assert seen == reference.fingerprint(data)
    if nbytes <= 128 << 20:
        assert seen == reference.fingerprint(data.cpu())


@pytest.mark.parametrize("seed", range(40))
def test_blocks(kernels: Kernels, seed: int) -> None:
    """Gather and scatter of random shapes move the reference's bytes and no others."""
    dice = random.Random(seed)
    planes, total = dice.randint(1, 96), dice.randint(1, 64)
    block_bytes = dice.choice([1, 24, 100, 4096, 16384, 32768])
    gap = dice.choice([0, 0, 16, 3])
    if dice.random() < 0.5:
        block_stride = block_bytes + gap
        plane_stride = total * block_stride
    else:
        plane_stride = block_bytes + gap
        block_stride = planes * plane_stride
    packed_stride = planes * block_bytes + gap
    blocks = dice.sample(range(total), dice.randint(1, total))
    places = dice.sample(range(len(blocks) + 2), len(blocks))
    base = noise(planes * plane_stride + total * block_stride, seed)
    packed = noise((len(blocks) + 2) * packed_stride, seed + 100)
    sizes = (planes, block_bytes, plane_stride, block_stride, packed_stride)
    named = {
        "planes": planes,
        "block_bytes": block_bytes,
        "plane_stride": plane_stride,
        "block_stride": block_stride,
        "packed_stride": packed_stride,
    }
    stream = torch.cuda.current_stream().cuda_stream
    indices = torch.tensor(blocks), torch.tensor(places)
    for function, kernel, target, source in (
        (reference.gather_blocks, kernels.gather_blocks, packed, base),
        (reference.scatter_blocks, kernels.scatter_blocks, base, packed),
    ):
        expected = target.clone()
        function(expected, source, *indices, *sizes)
        kernel(target.data_ptr(), source.data_ptr(), blocks, places, **named, stream=stream)
        torch.cuda.synchronize()

        assert torch.equal(target, expected)


def test_decode_exp7(kernels: Kernels) -> None:
    """Blocks with hardly an escape, with many and kept as they are, and part of one, from any on,
    as the reference has them."""
    weights = torch.randn(9 * exp7.VALUES + 100, generator=torch.Generator().manual_seed(1))
    plain = (weights * 0.02).bfloat16().view(torch.uint8)
    for block in range(2, 9):
        start = block * exp7.BLOCK_BYTES
        strange = noise(exp7.BLOCK_BYTES * min(block - 1, 5) // 16, block).cpu()
        plain[start : start + len(strange)] = strange
    encoder, parts, end = exp7.Encoder(), [], 0
    table = np.zeros(10, exp7.ENTRY)
    for block in range(10):
        found = encoder.encode(plain.numpy()[block * exp7.BLOCK_BYTES :][: exp7.BLOCK_BYTES])
        found.enter(table, block, end)
        parts.append(found.data)
        end += len(found.data)
    assert (table["escapes"] == exp7.RAW).sum() < 8
    image = torch.from_numpy(np.concatenate(parts)).cuda()
    entries = torch.from_numpy(table.view(np.uint8)).cuda()
    for first in (0, 3, 9):
        rest = plain[first * exp7.BLOCK_BYTES :]
        target = torch.zeros(len(rest) + 64, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        places = (target.data_ptr(), image.data_ptr(), entries.data_ptr())
        kernels.decode_exp7(*places, first, 10 - first, stream=stream)
        torch.cuda.synchronize()

        assert torch.equal(target[: len(rest)].cpu(), rest)
        assert not target[len(rest) :].any()
