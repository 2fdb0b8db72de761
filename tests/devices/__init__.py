"""What every backend of device memory has to do; the same tests for host, stand-in and GPU."""

import pytest

pytest.register_assert_rewrite(
    "tests.devices.vmm", "tests.devices.streams", "tests.devices.swapping"
)
