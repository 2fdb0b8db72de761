"""A configuration as a file would have it, to be compared with another."""

from __future__ import annotations

import pytest

from appliance.config.diff import as_written
from appliance.config.schema import Devices
from appliance.units import Bytes, Memory


@pytest.mark.parametrize(
    ("nbytes", "written"),
    [
        (192 << 20, "192MiB"),
        (1408 << 20, 1408 << 20),  # 1.375 GiB, and 1.4GiB is not a whole number of bytes
        (int(0.9 * (143771 << 20)), int(0.9 * (143771 << 20))),  # a share of a GPU
    ],
)
def test_sizes_are_written_to_the_byte(nbytes: int, written: str | int) -> None:
    whole = Bytes(1 << 30)
    devices = Devices(memory_bytes=Memory(nbytes), slab_bytes=whole, host_cache_bytes=whole)

    assert as_written(devices)["memory"] == written
