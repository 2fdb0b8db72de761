"""Packed weights: the seam to oneDNN, and which layers compute with them."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.memory.arena import Arena
from appliance.memory.vmm_host import HostVmm
from appliance.platform.cpus import packs
from tests.engine.house import SLAB, Baseline, House, Sampling, make_house, sequence, tokens

# The last one is no multiple of oneDNN's blocks: its packed bytes are more than its own.
SHAPES = [(768, 256), (64, 512), (100, 36)]


def pack(weight: Any) -> tuple[Any, Any]:
    """A copy of a weight's packed bytes, made piece by piece, and how they lie."""
    import torch

    from appliance.engines.vllm.weights import packed
    from appliance.engines.vllm.weights.tensors import bytes_at

    packing = packed.plan(tuple(weight.shape), weight.dtype)
    pieces: list[Any] = []
    for rows in weight.split(packing.piece_rows):
        packing.pack(rows, lambda a, n: pieces.append(bytes_at(a, n).clone()))
    return torch.cat(pieces), packing


x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="weights are packed on x86-64")


@x86_64
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_come_from_our_memory(shape: tuple[int, int], dtype: str) -> None:
    """A view is made of unmapped addresses; what is put there is what is multiplied, as by vLLM."""
    import torch
    import vllm._custom_ops

    from appliance.engines.vllm.weights import packed
    from appliance.engines.vllm.weights.tensors import bytes_at

    typed = getattr(torch, dtype)
    if not packed.supports(typed):
        pytest.skip(f"this CPU has no instructions for {dtype}")
    torch.manual_seed(1)
    weight, bias = torch.randn(shape).to(typed), torch.randn(shape[0]).to(typed)
    data, packing = pack(weight)
    region = Arena(HostVmm(4, SLAB)).reserve("packed", 4)

    linear = packed.PackedLinear(region.address, packing)
    assert torch.ops.mkldnn.data_ptr(linear.view) == region.address
    region.map(range(4))
    memory = bytes_at(region.address, data.nbytes)
    memory.copy_(data)

    stock = vllm._custom_ops.create_onednn_mm(weight.t(), 32)
    for rows in (1, 2, 16, 77):
        # A slice of wider rows, as attention layers hand them on.
        x = torch.randn(rows, 2 * shape[1]).to(typed)[:, shape[1] :]
        for added in (None, bias):
            product = linear(x, None, added)
            plain = torch.nn.functional.linear(x, weight, added)
            torch.testing.assert_close(product, plain, rtol=1e-2, atol=1e-3)
            assert torch.equal(product, vllm._custom_ops.onednn_mm(stock, x, added))
    memory.zero_()
    assert not linear(x, None).any()


@x86_64
def test_packings_tell_layouts_apart() -> None:
    """Equal for weights that are read alike, whatever they hold, so that images can be shared."""
    import torch

    from appliance.engines.vllm.weights import packed

    first, other = packed.plan((64, 32), torch.float32), packed.plan((32, 64), torch.float32)
    packed.plan.cache_clear()
    again = packed.plan((64, 32), torch.float32)
    assert first == again
    assert first.digest == again.digest != other.digest


@x86_64
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4096, 2048), (3000, 1111), (70, 33), (64, 40000)], ids=str)
def test_pieces_are_the_whole(shape: tuple[int, int], dtype: str) -> None:
    """Packed some rows at a time, every bit is where oneDNN puts it when it packs all of them."""
    import torch

    from appliance.engines.vllm.weights import packed

    typed = getattr(torch, dtype)
    if not packed.supports(typed):
        pytest.skip(f"this CPU has no instructions for {dtype}")
    # Any bits at all: infinities and NaN of all kinds among them.
    bits = torch.empty(shape[0], shape[1] * typed.itemsize, dtype=torch.uint8)
    weight = bits.random_(generator=torch.Generator().manual_seed(1)).view(typed)

    data, packing = pack(weight)

    with packed._reordered(weight) as (whole, descriptor):
        assert torch.equal(data, whole)
        assert packing.descriptor == descriptor
    assert packing.nbytes == len(data)


@x86_64
def test_an_order_that_is_not_rows_is_packed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should oneDNN once put the blocks of rows in another order, none is packed alone."""
    import torch

    from appliance.engines.vllm.weights import packed

    packed.plan.cache_clear()
    monkeypatch.setattr(packed, "BLOCK_ROWS", 8)
    monkeypatch.setattr(packed, "PIECE_BYTES", 8 * 32 * 4)
    try:
        packing = packed.plan((64, 32), torch.float32)
    finally:
        packed.plan.cache_clear()
    assert (packing.piece_rows, packing.piece_bytes) == (64, packing.nbytes)


@pytest.fixture
def fresh_seam() -> Iterator[None]:
    """What is remembered of torch's library is found out again, before and after."""
    from appliance.engines.vllm.weights import packed

    packed._library.cache_clear()
    yield
    packed._library.cache_clear()


@x86_64
@pytest.mark.usefixtures("fresh_seam")
def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its version, by what it lacks, and by a copy where a view was asked for."""
    import torch

    from appliance.engines.vllm.seams import SeamMoved
    from appliance.engines.vllm.weights import packed

    data, packing = pack(torch.ones(64, 64))
    with monkeypatch.context() as patched:
        patched.setattr(packed, "_data_ptr", lambda tensor: 0)
        with pytest.raises(SeamMoved, match="copied"):
            packed.view_at(data.data_ptr(), packing)
    packed._library.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(packed, "_DTYPES", {torch.float32: "aoti_torch_dtype_moved"})
        with pytest.raises(SeamMoved, match="aoti_torch_dtype_moved"):
            packed.supports(torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "2.14.0+cpu")
        with pytest.raises(SeamMoved, match=r"2\.14\.0"):
            packed.supports(torch.float32)


@x86_64
@pytest.mark.parametrize("shape", [*SHAPES, (144, 288), (1536, 24)], ids=str)
def test_the_number_of_threads_changes_no_byte(shape: tuple[int, int]) -> None:
    """Packed bytes and how they lie are the same on all processors."""
    import torch

    from appliance.engines.vllm.weights import packed

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    # Not through torch: where vLLM has bound its threads, it lets no one else set their number.
    openmp = ctypes.CDLL(str(packed._torch_library()))
    threads = openmp.omp_get_max_threads()
    found = []
    try:
        for number in (1, 2, 4):
            openmp.omp_set_num_threads(number)
            packed.plan.cache_clear()
            found.append(pack(weight))
            assert openmp.omp_get_max_threads() == number
    finally:
        openmp.omp_set_num_threads(threads)
        packed.plan.cache_clear()
    for data, packing in found[1:]:
        assert torch.equal(data, found[0][0])
        assert packing == found[0][1]


@x86_64
def test_every_linear_layer_is_packed(house: House) -> None:
    """All layers that vLLM packs, and the head, tied or not; the embedding keeps its rows."""
    from vllm.model_executor.layers.linear import LinearBase

    from appliance.engines.vllm.weights.packed import PackedLinear, supports

    engines = [e for e in house.engines.values() if supports(e._runner.dtype)]
    assert engines
    for engine in engines:
        model = engine._runner.get_model()
        linears = {n for n, m in model.named_modules() if isinstance(m, LinearBase)} | {"lm_head"}
        packed = {
            name
            for name, module in model.named_modules()
            if isinstance(vars(module).get("cpu_linear"), PackedLinear)
        }
        assert packed == linears
        assert {f"{name}.weight" for name in linears} == set(engine._placed.packings)
        # Nothing that reads rows could take packed bytes for some.
        assert all(model.get_submodule(name).weight.ndim == 1 for name in linears)
        assert model.model.embed_tokens.weight.ndim == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_packed_is_known_without_an_engine(dtype: str) -> None:
    """A tied head is counted twice where `packs` is certain, and it never is in vain."""
    import torch

    from appliance.engines.vllm.weights import packed

    assert not packs(dtype) or packed.supports(getattr(torch, dtype))


def test_other_cpus_compute_with_plain_weights(
    checkpoints: dict[str, str], plain_vllm: Baseline, monkeypatch: pytest.MonkeyPatch, house: House
) -> None:
    """Not packed, and in a layout of its own, an engine is slower but right."""
    model, prompt = "llama-96", tuple(range(20, 60))
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    plain: Any = make_house().build(model, checkpoints[model])
    sampling = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)

    plain.begin_load().wait()
    plain.add(sequence(model, "r", prompt, sampling))
    output = tokens(plain.prefill("r", 40))
    while plain.knows("r"):
        output += tokens(plain.step(["r"], 40))

    assert not plain._placed.packings
    assert [output] == plain_vllm(model, [prompt], [sampling])
    assert plain.layout_digest != house.engines[model].layout_digest
