"""Models that vLLM cannot compute on a CPU: refused by name, though their weights are placed, byte
for byte, as plain vLLM loads them. What computes with them was run nowhere."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from appliance.checkpoints.families import UnsupportedModel
from appliance.config.schema import Model
from appliance.config.sizing import read_model
from appliance.engines.protocol import Verdict
from appliance.engines.vllm.weights import parameters
from appliance.engines.vllm.weights.recipe import UnsupportedCheckpoint
from tests.configs import CONFIGS, NOT_ON_CPU, SPARSE
from tests.engine.house import House, Sampling, make_house, sequence
from tests.engine.quantizing import make_plain
from tests.engine.test_families import CONTEXT, DEVICES
from tests.engine.uncomputed import make_step, make_v4, place_weights, plain_weights

STEP = "step-3.5-flash-bf16"
KIMI = "kimi-linear-48b-a3b"
V4 = "deepseek-v4"
MAMBA_1 = sorted(set(NOT_ON_CPU) - {STEP, KIMI})
CHOOSES = r"chooses which tokens to read \(sparse MLA\)"
REASONS = {
    **NOT_ON_CPU,
    **dict.fromkeys(SPARSE, f"{CHOOSES}.* on CPUs, vLLM has no such attention"),
    V4: f"{CHOOSES}.* on CPUs, vLLM needs Triton for it",
}
DTYPES = ["float32", "bfloat16"]
SLABS = 48


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths by name."""
    folder = tmp_path_factory.mktemp("uncomputed")
    written = [*MAMBA_1, KIMI, *SPARSE]
    make_plain(folder, written)
    made = {STEP: make_step(folder, STEP, CONFIGS[STEP]), V4: make_v4(folder)}
    return made | {n: str(folder / n) for n in written}


@pytest.fixture(scope="module", autouse=True)
def _groups(checkpoints: dict[str, str]) -> Iterator[None]:
    """An engine, as the first one of a process makes the groups of ranks."""
    make_house().build("first", checkpoints[MAMBA_1[0]], dtype="float32")
    yield
    gc.collect()


@pytest.mark.parametrize("name", REASONS)
def test_config_check_names_what_is_missing(checkpoints: dict[str, str], name: str) -> None:
    model = Model(name=name, path=checkpoints[name], dtype="float32", max_context=CONTEXT)
    with pytest.raises(UnsupportedModel, match=REASONS[name]):
        read_model(model, DEVICES)


@pytest.mark.parametrize("name", MAMBA_1)
def test_an_engine_is_built_and_lacks_the_named_kernel_only(
    checkpoints: dict[str, str], name: str
) -> None:
    """The whole engine is: its states have places, too. Once vLLM has the kernel, this fails."""
    house = make_house()
    engine = house.build(name, checkpoints[name], dtype="float32")
    engine.begin_load()
    house.swapper.settle()
    assert engine.verify() is Verdict.OK
    engine.add(sequence(name, "r", tuple(range(20, 60)), Sampling(max_tokens=2)))

    with pytest.raises(AttributeError, match="no attribute 'selective_scan_fwd'"):
        engine.prefill("r", SLABS)

    engine.retire()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MAMBA_1)
def test_weights_are_those_of_plain_vllm(
    checkpoints: dict[str, str], name: str, dtype: str
) -> None:
    compare(make_house(), checkpoints[name], dtype)


def test_bounded_experts_have_no_kernel_on_cpus(checkpoints: dict[str, str]) -> None:
    """vLLM says so as it builds the model. Once it has one, this fails."""
    with pytest.raises(NotImplementedError, match="No Unquantized MoE backend supports"):
        place_weights(make_house(), checkpoints[STEP], "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_bounded_experts(
    checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """With the CPU's kernel of experts, which is said to compute what it does not: it decides how
    their weights lie, and nothing is computed."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    supports = staticmethod(lambda activation: True)
    monkeypatch.setattr(CPUUnquantizedExperts, "_supports_activation", supports)
    compare(make_house(), checkpoints[STEP], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_kimi_linear(
    checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """vLLM's module of it is CUDA's also on a CPU. Two things are left out that hold no weights: a
    product that is fused with its reduction, and Numba, which reads images: once that is in a
    process, vLLM builds no further model there."""
    monkeypatch.setattr("vllm.utils.import_utils.is_numba_available", lambda: False)
    fused = "vllm.models.kimi_k3.nvidia.model.maybe_init_gemm_rs_ar"
    monkeypatch.setattr(fused, lambda *_: False)
    compare(make_house(), checkpoints[KIMI], dtype)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_has_no_backend_on_cpus(checkpoints: dict[str, str], name: str) -> None:
    """vLLM says so as it builds the model. Once it has one, this fails."""
    with pytest.raises(NotImplementedError, match="Sparse Attention is not supported on CPU"):
        place_weights(make_house(), checkpoints[name], "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPARSE)
def test_weights_of_sparse_attention(
    checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    """With the CPU's backend of MLA that is not sparse in the place of the one that vLLM lacks:
    nothing else is another one. What chooses tokens (the indexer) has its weights.

    An engine of it would still be refused (`PrivateWeights`) for a buffer of chosen tokens that
    layers share, which is memory besides the weights.
    """
    from vllm.platforms import current_platform

    choose = current_platform.get_attn_backend_cls

    def not_sparse(selected: Any, attn_selector_config: Any, **others: Any) -> str:
        found: str = choose(selected, attn_selector_config._replace(use_sparse=False), **others)
        return found

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", staticmethod(not_sparse))
    house = make_house()
    found = compare(house, checkpoints[name], dtype, moved=False)
    assert any(".indexer." in tensor for tensor in found)
    with pytest.raises(parameters.PrivateWeights, match="topk_indices_buffer"):
        compare(make_house(), checkpoints[name], dtype)


def test_the_attention_of_v4_needs_triton(checkpoints: dict[str, str]) -> None:
    """vLLM has a model of it for CPUs, and kernels. But what prepares each step maps tokens to
    requests with a kernel of Triton, of which there is none here. Once there is, this fails."""
    from vllm.v1.attention.ops.metadata import compute_token_to_req_indices

    starts = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(TypeError, match="'function' object is not subscriptable"):
        compute_token_to_req_indices(starts, torch.zeros(3, dtype=torch.int32), 3, 3)


def test_layers_of_v4_keep_copies_of_weights(checkpoints: dict[str, str]) -> None:
    """vLLM packs one of a layer's weights apart, where no eviction would reach it: an engine of it
    is refused for that."""
    with pytest.raises(UnsupportedCheckpoint, match=r"attn\.wo_a\.weight while loading"):
        place_weights(make_house(), checkpoints[V4], "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_v4(
    checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Without what is made of them besides: a packed copy, and norms in float32."""
    from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention

    for made in ("_wrap_wo_a_process_weights_after_loading", "process_weights_after_loading"):
        monkeypatch.setattr(DeepseekV4CPUAttention, made, lambda *_: None)
    found = compare(make_house(), checkpoints[V4], dtype, moved=False)
    for part in ("indexer.wq_b", "compressor.ape", "attn_sink", "hc_ffn_fn", "gate.tid2eid"):
        assert any(part in tensor for tensor in found)
    with pytest.raises(parameters.PrivateWeights, match="topk_indices_buffer"):
        compare(make_house(), checkpoints[V4], dtype)


def compare(house: House, path: str, dtype: str, *, moved: bool = True) -> dict[str, bytes]:
    """The image of the weights with what plain vLLM holds, the device with the image, and, where
    all are to be `moved`, that layers compute with nothing else. The image's tensors."""
    alone = place_weights(house, path, dtype)
    image = alone.image()
    expected = plain_weights(path, dtype, alone.placed)

    assert image.keys() <= expected.keys()
    assert [name for name, found in image.items() if found != expected[name]] == []
    assert alone.placed.compare() is Verdict.OK
    held = {name for name, p in alone.model.named_parameters(remove_duplicate=False) if p.numel()}
    assert held == expected.keys()
    if moved:
        placed = alone.placed
        parameters.check_moved(alone.model, placed.weights, placed.packings, range(0))
    return image
