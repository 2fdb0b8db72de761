"""What front ends and the compiler of guides are forked from, as the core starts it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from appliance.forking.server import ForkServer
from appliance.platform.children import module_command, without_secrets

ZYGOTE: Final = module_command("appliance.frontend.zygote")


def front_forks(command: Sequence[str] = ZYGOTE) -> ForkServer:
    """Forks front ends, not started yet."""
    return ForkServer(command, _environment, "front ends")


def _environment(scratch: str) -> dict[str, str]:
    """No device, no threads that a fork would leave behind."""
    return {
        **without_secrets(os.environ),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TMPDIR": scratch,
    }
