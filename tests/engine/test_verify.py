"""Weights on the device against their master images, on a real engine."""

from __future__ import annotations

from appliance.engines.protocol import Verdict
from tests.engine.house import House, Sampling, sequence

MODEL = "qwen2-gqa"


def test_weights_are_compared_with_their_image(house: House) -> None:
    """Equal once they are loaded; one bit at either end of the image is seen, and seen to be
    mended."""
    engine = house.engines[MODEL]
    assert engine.verify() is Verdict.NOT_LOADED
    engine.begin_load().wait()
    assert engine.verify() is Verdict.OK

    layout = engine._placed.weights.layout
    for offset in (0, layout.offsets[-1] + layout.tensors[-1].nbytes - 1):
        slab, start = divmod(offset, house.arena.slab_bytes)
        byte = house.host.view(house.images[MODEL][slab] + start, 1)
        byte[0] ^= 1
        assert engine.verify() is Verdict.DIFFERS
        byte[0] ^= 1
    assert engine.verify() is Verdict.OK

    engine.evict_weights()
    assert engine.verify() is Verdict.NOT_LOADED


def test_without_an_image_there_is_nothing_to_compare_with(house: House) -> None:
    """Weights that came from the files are not called wrong, nor right."""
    engine = house.engines[MODEL]
    engine.store_weights((), fill=False)
    try:
        engine.begin_load().wait()
        assert engine.verify() is Verdict.NO_IMAGE
    finally:
        engine.evict_weights()
        engine.store_weights(house.images[MODEL], fill=False)


def test_kv_is_counted_in_bytes(house: House) -> None:
    """Nothing before, whole groups and used blocks while a request lives, cold ones afterwards."""
    engine = house.engines[MODEL]
    engine.trim(0)
    assert engine.kv_use()[:3] == (0, 0, 0)
    engine.begin_load().wait()
    sampling = Sampling(max_tokens=4, temperature=0.0)
    engine.add(sequence(MODEL, "r", tuple(range(3, 103)), sampling))
    engine.prefill("r", 60)
    busy = engine.kv_use()
    engine.forget("r")
    idle = engine.kv_use()

    block, group = engine.kv.block_bytes, engine.kv.group_slabs * house.arena.slab_bytes
    assert (busy.used_bytes, busy.cold_bytes) == (4 * block, 0)
    assert busy.mapped_bytes % group == 0
    assert busy.peak_bytes >= busy.mapped_bytes >= busy.used_bytes
    assert (idle.used_bytes, idle.cold_bytes) == (0, 3 * block)
    engine.evict_weights()
    engine.trim(0)
    assert engine.kv_use()[:3] == (0, 0, 0)
