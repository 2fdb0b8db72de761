"""What processes of plain vLLM import, with its `worker_extension_cls`, to compute layers
as the appliance does where vLLM is wrong: workers of several ranks are processes of their own."""

from __future__ import annotations

from typing import Final

from vllm.platforms import current_platform

from appliance.engines.vllm.layers.mends import mend_cpu_layers, mend_layers

(mend_cpu_layers if current_platform.is_cpu() else mend_layers)()


class Mended:
    """Adds nothing to a worker: it is there to be imported."""


EXTENSION: Final = f"{Mended.__module__}.{Mended.__qualname__}"
"""Its name, for `worker_extension_cls`."""
