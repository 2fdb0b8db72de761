"""What the adapter takes for granted inside vLLM; each fails loudly when vLLM moves."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.house import House


def test_version_and_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned version passes, another one is refused."""
    import vllm

    from appliance.engines.vllm.seams import SeamMoved, check_seams

    check_seams()
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(SeamMoved, match=r"0\.33\.0"):
        check_seams()


def test_every_manager_uses_the_elastic_pool(house: House) -> None:
    """No part of vLLM's scheduler still holds the block pool that it made itself."""
    import gc

    from vllm.v1.core.block_pool import BlockPool

    from appliance.engines.vllm.scheduler import ElasticBlockPool

    for engine in house.engines.values():
        manager = engine._scheduler.kv_cache_manager
        pool = manager.block_pool
        assert isinstance(pool, ElasticBlockPool)
        assert manager.coordinator.block_pool is pool
        for single in manager.coordinator.single_type_managers:
            assert single.block_pool is pool
            assert single._null_block is pool.null_block
    stock = [o for o in gc.get_objects() if type(o) is BlockPool]
    assert not stock


def test_kv_cache_lies_in_the_reserved_range(house: House) -> None:
    """Every layer's cache is a view of the region, with the strides the geometry says."""
    for engine in house.engines.values():
        geometry = engine._cache.pool.geometry
        caches = engine._runner.kv_caches
        assert len(caches) == geometry.layers
        for layer, cache in enumerate(caches):
            assert cache.data_ptr() == engine._cache.addresses.start + layer * geometry.layer_bytes
            assert cache.stride(0) * cache.element_size() == geometry.layer_block_bytes
            assert cache.shape[0] == geometry.blocks


def test_parameters_lie_in_the_region(house: House) -> None:
    """No parameter keeps memory of its own."""
    for engine in house.engines.values():
        first = engine._placed.weights.region.address
        end = first + engine._placed.weights.region.slots * house.arena.slab_bytes
        # Addresses, not tensors: pytest would read those to show them, and nothing is mapped.
        parameters = engine._runner.get_model().named_parameters()
        outside = [name for name, p in parameters if not first <= p.data_ptr() < end]
        assert outside == []


def test_private_weights_are_found(house: House) -> None:
    """A layer that kept a copy of its weights would be noticed when they are stored."""
    import torch

    from appliance.engines.vllm.weights.packed import PackedLinear
    from appliance.engines.vllm.weights.parameters import PrivateWeights, check_moved

    engine = house.engines["llama-mha"]
    model = engine._runner.get_model()

    def check() -> None:
        check_moved(model, engine._placed.weights, engine._placed.packings, engine._cache.addresses)

    check()
    name, packing = next(iter(engine._placed.packings.items()))
    linear = model.get_submodule(name.removesuffix(".weight"))
    ours, copy = linear.cpu_linear, torch.zeros(4, 4)
    elsewhere = PackedLinear(ours.address + 4096, packing)
    try:
        for other in (elsewhere, lambda x, weight, bias: torch.nn.functional.linear(x, copy, bias)):
            linear.cpu_linear = other
            with pytest.raises(PrivateWeights, match="does not multiply with its weight"):
                check()
    finally:
        linear.cpu_linear = ours
    embedding = model.model.embed_tokens
    plain = embedding.cpu_linear
    try:
        for other in (ours, lambda x, weight, bias: torch.nn.functional.linear(x, copy, bias)):
            embedding.cpu_linear = other
            with pytest.raises(PrivateWeights, match="packed copy"):
                check()
    finally:
        embedding.cpu_linear = plain
    linear.own_copy = copy
    try:
        with pytest.raises(PrivateWeights, match="own_copy"):
            check()
    finally:
        del linear.own_copy


def test_preemption_is_impossible(house: House) -> None:
    """vLLM's way out of too few blocks would recompute a request; it must never be taken."""
    engine = house.engines["llama-mha"]
    request = type("R", (), {"request_id": "r"})()
    with pytest.raises(AssertionError, match="blocks were promised"):
        engine._scheduler._preempt_request(request, 0.0)


def test_sampler_draws_one_integer_per_token() -> None:
    """A request that resumes has its generator in the state that vLLM's CPU sampler left it in."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from appliance.engines.vllm.device import HostDevice

    source = inspect.getsource(TopKTopPSampler.forward_cpu)
    assert "seeds[i] = torch.randint(\n                0, 2**31, (1,), generator=gen" in source
    sampler = TopKTopPSampler()
    used = torch.Generator().manual_seed(9)
    for _ in range(3):
        sampler(torch.zeros(1, 64), {0: used}, None, None)
    replayed = HostDevice().generator(9, 3, 64)
    assert torch.equal(used.get_state(), replayed.get_state())


def arena_worker(*specs: object, max_context: int = 1024) -> Any:
    """A worker whose model has layers that keep their KV so."""
    from appliance.engines.vllm.worker_cpu import ArenaWorker

    made = object.__new__(ArenaWorker)
    layers = {f"layer.{i}": spec for i, spec in enumerate(specs)}
    made.model_runner = type("Runner", (), {"get_kv_cache_spec": lambda self: layers})()
    longest = SimpleNamespace(max_model_len=max_context)
    made.vllm_config = SimpleNamespace(model_config=longest)
    return made


def test_mixed_kv_shapes_are_refused() -> None:
    """A model whose layers keep their KV differently is named, not served wrongly."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from appliance.engines.vllm.worker import UnsupportedKvCache

    common = {"block_size": 32, "num_kv_heads": 2, "dtype": torch.float32}
    narrow, wide = (FullAttentionSpec(head_size=size, **common) for size in (32, 64))
    with pytest.raises(UnsupportedKvCache, match="differ in the size"):
        arena_worker(narrow, wide).determine_available_memory()
    prefix = FullAttentionSpec(head_size=32, non_causal=True, **common)
    with pytest.raises(UnsupportedKvCache, match="not of all tokens"):
        arena_worker(prefix).determine_available_memory()
    with pytest.raises(UnsupportedKvCache, match="differ in the size"):
        arena_worker().determine_available_memory()


def test_layers_with_a_window() -> None:
    """They have blocks as those of other layers; where the window holds the longest request, they
    keep all tokens, and it stays known to attention. Chunks are windows as long as they are."""
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        SlidingWindowSpec,
    )

    common = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full = FullAttentionSpec(block_size=32, **common)
    window = SlidingWindowSpec(block_size=16, sliding_window=64, **common)
    found = arena_worker(full, window, max_context=96).get_kv_cache_spec()
    assert found == {
        "layer.0": full,
        "layer.1": FullAttentionSpec(block_size=32, sliding_window=64, **common),
    }
    found = arena_worker(full, window, max_context=97).get_kv_cache_spec()
    assert found == {
        "layer.0": full,
        "layer.1": SlidingWindowSpec(block_size=32, sliding_window=64, **common),
    }
    chunked = ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=64, **common)
    assert arena_worker(full, chunked, max_context=97).get_kv_cache_spec() == found


def test_kernels_are_replaced_once_for_all_models(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look through all modules takes longer than to build a small model. vLLM's way of doing it,
    which a later model does not go, is what it was."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    assert len(house.engines) > 1
    replaced = ComputeSlotMappingKernel.kernel
    assert isinstance(replaced, dispatcher.KernelOverride)
    (registered,) = (
        original
        for name, (original, _) in dispatcher._registry.items()
        if name.endswith("block_table.ComputeSlotMappingKernel.kernel")
    )
    assert not isinstance(registered, dispatcher.KernelOverride)
    current_platform.register_triton_kernel_overrides()
    assert ComputeSlotMappingKernel.kernel is replaced
    monkeypatch.setattr(dispatcher, "_registry", {})
    monkeypatch.setattr(dispatcher, "register_kernels", _register)
    with pytest.raises(_Registering):
        current_platform.register_triton_kernel_overrides()


class _Registering(Exception):
    pass


def _register(overrides: dict[str, Any]) -> None:
    assert overrides
    raise _Registering
