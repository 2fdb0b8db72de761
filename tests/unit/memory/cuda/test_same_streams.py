"""Streams of the host and of CUDA's driver (a stand-in) do the same."""

from __future__ import annotations

import pytest

from appliance.memory.streams import Copy
from appliance.memory.transfers import TransferFailed
from tests.conformance.streams import Cluster, StreamConformance, cluster
from tests.unit.doubles.device_backends import bench

__all__ = ["bench", "cluster"]


class TestStreams(StreamConformance):
    def test_a_stream_goes_on_after_a_failure(self, cluster: Cluster) -> None:
        """Lazy copies that cannot be made fail their own transfer only."""
        failed, good = cluster.transfer(4), cluster.transfer(4)
        cluster.streams[0].run(failed, (1 / 0 for _ in range(1)))  # type: ignore[misc]
        cluster.streams[0].run(good, [Copy(cluster.base, cluster.host(0, b"good"), 4)])
        good.wait()

        with pytest.raises(TransferFailed, match="division by zero"):
            failed.wait()
        assert cluster.read(0, 4) == b"good"
