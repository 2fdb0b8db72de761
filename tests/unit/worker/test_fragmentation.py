"""KV memory that is taken and not used, as a share of the most that was ever taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engines.protocol import KvBytes
from appliance.worker.fragmentation import KvMeter, by_shape, fragmentation


def test_cold_blocks_are_used_memory() -> None:
    """Prefix cache is worth its place; only what no block fills is lost."""
    assert fragmentation(KvBytes(80, 40, 20, 100)) == 0.2
    assert fragmentation(KvBytes(60, 40, 20, 100)) == 0.0


def test_nothing_allocated_is_not_fragmented() -> None:
    """Before any KV there is nothing to divide by."""
    assert fragmentation(KvBytes(0, 0, 0, 0)) == 0.0
    assert by_shape([]) == {}
    assert KvMeter().measure([]) == {}


def test_peaks_of_models_that_took_turns_are_not_added_up() -> None:
    """Two models had the whole pool one after the other: the peak of their shape is one pool."""
    meter = KvMeter()
    meter.measure([(300, KvBytes(100, 90, 0, 100)), (300, KvBytes(0, 0, 0, 0))])
    now = meter.measure([(300, KvBytes(0, 0, 0, 100)), (300, KvBytes(100, 50, 0, 100))])

    assert now == {300: KvBytes(100, 50, 0, 100)}
    assert meter.peak_bytes == 100


def test_a_peak_between_two_measurements_counts() -> None:
    """A model had more than anybody saw; it says so itself."""
    meter = KvMeter()

    assert meter.measure([(300, KvBytes(10, 10, 0, 70))]) == {300: KvBytes(10, 10, 0, 70)}
    assert meter.peak_bytes == 70


def test_a_shape_that_is_gone_keeps_its_peak() -> None:
    """What is measured again later is compared with the same peak."""
    meter = KvMeter()
    meter.measure([(300, KvBytes(100, 100, 0, 100))])
    meter.measure([])

    assert meter.measure([(300, KvBytes(20, 10, 0, 20))])[300].peak_bytes == 100


USE = st.builds(
    lambda blocks, cold, lost, more: KvBytes(
        blocks + cold + lost, blocks, cold, blocks + cold + lost + more
    ),
    *[st.integers(0, 1000)] * 4,
)


@given(st.lists(st.lists(st.tuples(st.sampled_from([100, 200, 300]), USE), max_size=5), max_size=8))
def test_a_share_is_between_nothing_and_all(measurements: list[list[tuple[int, KvBytes]]]) -> None:
    """Whatever is measured: nothing is lost of the sums, no peak falls, and no share exceeds 1."""
    meter, peaks = KvMeter(), dict.fromkeys([100, 200, 300], 0)
    for uses in measurements:
        before = meter.peak_bytes
        measured = meter.measure(uses)

        assert list(measured) == sorted({shape for shape, _ in uses})
        assert sum(u.mapped_bytes for u in measured.values()) == sum(u[0] for _, u in uses)
        for shape, use in measured.items():
            assert 0.0 <= fragmentation(use) <= 1.0
            assert peaks[shape] <= use.peak_bytes <= meter.peak_bytes
            peaks[shape] = use.peak_bytes
        assert meter.peak_bytes >= max(before, *[u.mapped_bytes for u in measured.values()], 0)


@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2]])
def test_shapes_are_in_order(order: list[int]) -> None:
    """The same box is shown the same way whatever model came first."""
    assert list(by_shape((shape, KvBytes(1, 1, 0, 1)) for shape in order)) == [1, 2, 3]
