"""Sensors and errors of GPUs, on a pretend NVML."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from appliance.api.admin.watch import state_of
from appliance.observability.metrics import Metrics
from appliance.platform.gpu_monitor import XIDS_OF_PROGRAMS, GpuReading, GpuWatch
from tests.patience import PATIENCE_SECONDS
from tests.unit.api.test_metrics import samples
from tests.unit.doubles.daemon import box_maker
from tests.unit.doubles.pretend_nvml import PretendNvml, install

GIB = 1 << 30
READING = GpuReading(
    utilization=0.5,
    memory_used_bytes=2 * GIB,
    memory_bytes=8 * GIB,
    power_watts=300.5,
    celsius=60,
    ecc_corrected=7,
    ecc_uncorrected=0,
)


@contextmanager
def watching(
    nvml: PretendNvml, *gpus: int, tell: Callable[[int, str], None] | None = None
) -> Iterator[GpuWatch]:
    """A watch that has looked once."""
    watch = GpuWatch(gpus, every_seconds=0.05)
    watch.start(tell)
    if "events" not in nvml.lacking:
        nvml.waits.get(timeout=PATIENCE_SECONDS)
    try:
        yield watch
    finally:
        watch.stop()
        assert watch.join(PATIENCE_SECONDS)


def test_sensors_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the GPUs that are ours, in plain units; NVML is closed again."""
    nvml = install(monkeypatch, [8 * GIB, 16 * GIB])

    with watching(nvml, 0) as watch:
        assert nvml.registered == [0]
        assert watch.readings == {0: READING}
    assert nvml.open == 0


def test_what_a_gpu_has_no_sensor_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are read all the same."""
    nvml = install(monkeypatch, [8 * GIB])
    nvml.lacking = {"power", "ecc", "utilization"}

    with watching(nvml, 0) as watch:
        assert watch.readings[0] == READING._replace(
            utilization=None, power_watts=None, ecc_corrected=None, ecc_uncorrected=None
        )


def test_critical_errors_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is counted by GPU and code, and logged."""
    nvml = install(monkeypatch, [8 * GIB, 8 * GIB])

    with watching(nvml, 0, 1) as watch:
        for error in ((1, 79), (0, 48), (1, 79)):
            nvml.errors.put(error)
        while sum(watch.xids.values()) < 3:
            nvml.waits.get(timeout=PATIENCE_SECONDS)

        assert watch.xids == {(1, 79): 2, (0, 48): 1}
    assert caplog.text.count("XID 79") == 2


def test_a_gpu_fails_of_errors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of those that programs bring about."""
    nvml = install(monkeypatch, [8 * GIB, 8 * GIB])
    told: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    with watching(nvml, 0, 1, tell=lambda *about: told.put(about)):
        for code in (*sorted(XIDS_OF_PROGRAMS), 79):
            nvml.errors.put((1, code))

        first = told.get(timeout=PATIENCE_SECONDS)

    assert first == (1, "critical error of GPU 1, XID 79")
    assert told.empty()


def test_a_gpu_fails_of_memory_errors_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those from before the watch say nothing; each later one is told once."""
    nvml = install(monkeypatch, [8 * GIB])
    nvml.uncorrected = 3
    told: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    with watching(nvml, 0, tell=lambda *about: told.put(about)):
        for _ in range(2):
            nvml.waits.get(timeout=PATIENCE_SECONDS)
        assert told.empty()
        nvml.uncorrected = 4
        assert told.get(timeout=PATIENCE_SECONDS) == (
            0,
            "uncorrectable memory errors (ECC) of GPU 0",
        )
        for _ in range(2):
            nvml.waits.get(timeout=PATIENCE_SECONDS)

    assert told.empty()


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_gpu_that_is_lost_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, from_the_start: bool
) -> None:
    """At every look, as it may have been released meanwhile; the log has it once, and the others
    are read on."""
    nvml = install(monkeypatch, [8 * GIB, 8 * GIB])
    told: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    nvml.lost = {1} if from_the_start else set()

    with watching(nvml, 0, 1, tell=lambda *about: told.put(about)) as watch:
        nvml.lost = {1}
        nvml.errors.put((1, 79))  # of which NVML cannot say any more whose it is
        heard = [told.get(timeout=PATIENCE_SECONDS) for _ in range(3)]
        assert watch.readings == {0: READING}

    assert set(heard) == {(1, "GPU 1 is lost: it has fallen off the bus")}
    assert caplog.text.count("fallen off the bus") == 1


def test_the_others_are_watched_when_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's wait fails for all of them then: their errors are heard, and their sensors read, as
    soon as it waits without the one that is lost."""
    monkeypatch.setattr("appliance.platform.gpu_monitor.RETRY_SECONDS", 2 * PATIENCE_SECONDS)
    nvml = install(monkeypatch, [8 * GIB, 8 * GIB])
    told: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    with watching(nvml, 0, 1, tell=lambda *about: told.put(about)) as watch:
        nvml.lost = {1}
        nvml.errors.put((0, 13))  # ends the wait
        assert told.get(timeout=PATIENCE_SECONDS)[0] == 1
        while len(nvml.registered) != 1:
            nvml.waits.get(timeout=PATIENCE_SECONDS)
        assert nvml.registered == [0]
        nvml.errors.put((0, 95))
        while (about := told.get(timeout=PATIENCE_SECONDS))[0] == 1:
            pass

        assert about == (0, "critical error of GPU 0, XID 95")
        assert watch.readings == {0: READING}
    assert nvml.open == 0


def test_a_driver_that_breaks_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing old is shown meanwhile, and the watch goes on when NVML does."""
    monkeypatch.setattr("appliance.platform.gpu_monitor.RETRY_SECONDS", 0.01)
    nvml = install(monkeypatch, [8 * GIB])

    with watching(nvml, 0) as watch:
        for _ in range(2):
            nvml.errors.put((-1, 0))
        while not nvml.errors.empty():
            nvml.waits.get(timeout=PATIENCE_SECONDS)
        nvml.errors.put((0, 13))
        while not watch.xids:
            nvml.waits.get(timeout=PATIENCE_SECONDS)

        assert watch.readings == {0: READING}
    assert caplog.text.count("cannot be watched") == 1
    assert nvml.open == 0


def test_a_gpu_that_tells_no_errors_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where events are not supported there are sensors still."""
    nvml = install(monkeypatch, [8 * GIB])
    nvml.lacking = {"events"}

    with watching(nvml, 0) as watch:
        for _ in range(2):
            nvml.reads.get(timeout=PATIENCE_SECONDS)
        assert watch.readings == {0: READING}, "of the first time"


def test_sensors_are_metrics() -> None:
    """By GPU; what has no sensor any more is not shown, errors are counted on."""
    metrics = Metrics()
    metrics.gpus.refresh({0: READING, 1: READING}, {(1, 79): 2})
    metrics.gpus.refresh({0: READING._replace(power_watts=None)}, {(1, 79): 3})
    found = {name: value for name, value in samples(metrics).items() if "gpu" in name}

    assert found == {
        "appliance_gpu_utilization_ratio{gpu=0}": 0.5,
        "appliance_gpu_memory_used_bytes{gpu=0}": 2 * GIB,
        "appliance_gpu_memory_bytes{gpu=0}": 8 * GIB,
        "appliance_gpu_temperature_celsius{gpu=0}": 60,
        "appliance_gpu_ecc_errors{gpu=0,kind=corrected}": 7,
        "appliance_gpu_ecc_errors{gpu=0,kind=uncorrected}": 0,
        "appliance_gpu_xid_errors_total{gpu=1,xid=79}": 3,
    }


async def test_the_daemon_shows_the_gpus_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its instances, from its start to its end; without GPUs NVML is not asked. A sensor
    that is not there is not told of."""
    nvml = install(monkeypatch, [8 * GIB, 8 * GIB])
    nvml.lacking = {"power", "utilization"}
    with box_maker(monkeypatch, slabs=20) as make:
        plain = make()
        plain.daemon.start()
        assert plain.samples("appliance_gpu_memory_bytes") == {}
        assert nvml.open == 0

        box = make(devices=["cuda:1"])
        box.daemon.start()
        nvml.waits.get(timeout=PATIENCE_SECONDS)
        assert box.samples("appliance_gpu_memory_bytes") == {"gpu=1": 8 * GIB}
        told = state_of(box.daemon.snapshot(), {})["instances"]["0"]["gpus"]
        assert list(told) == [
            {"gpu": 1, "celsius": 61, "memory_used_bytes": 2 * GIB, "memory_bytes": 8 * GIB}
        ]

        await box.daemon.stop()
        nvml.errors.put((1, 43))  # wakes the watch, which sees that it is over
