"""Streams of the host and of CUDA's driver (a stand-in) do the same."""

from __future__ import annotations

import pytest

from appliance.memory.streams import Copy
from appliance.memory.transfers import TransferFailed
from tests.devices.streams import Floor, StreamConformance, floor
from tests.unit.doubles.device_backends import bench

__all__ = ["bench", "floor"]


class TestStreams(StreamConformance):
    def test_a_stream_goes_on_after_a_failure(self, floor: Floor) -> None:
        """Lazy copies that cannot be made fail their own transfer only."""
        failed, good = floor.transfer(4), floor.transfer(4)
        floor.streams[0].run(failed, (1 / 0 for _ in range(1)))  # type: ignore[misc]
        floor.streams[0].run(good, [Copy(floor.base, floor.host(0, b"good"), 4)])
        good.wait()

        with pytest.raises(TransferFailed, match="division by zero"):
            failed.wait()
        assert floor.read(0, 4) == b"good"
