"""vLLM's own replacements of Triton kernels on a CPU, registered once for a process.

vLLM registers them for every model that is built. It looks through all names of all modules then,
which takes longer than building a small model, and wraps what it had wrapped before.
"""

from __future__ import annotations

from typing import Final

from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils import dispatcher

of_vllm: Final = CpuPlatform.register_triton_kernel_overrides


def register_overrides_once() -> None:
    """Have vLLM register its replacements for the first model of this process only. What is
    imported later finds them in the place of the kernels. Has no effect on a GPU. Idempotent."""
    CpuPlatform.register_triton_kernel_overrides = staticmethod(_register)


def _register() -> None:
    if not dispatcher._registry:
        of_vllm()
