"""The edge to the CUDA driver: calls that raise, and the context they run in.

Calls go through ``cuda.bindings.driver``, which is loaded with the first context, not before.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from appliance.platform.installation import remedy_for

_NOT_FOUND: Final = 500


class CudaError(OSError):
    """The driver refused; the text begins with the error's CUDA name."""

    def __init__(self, name: str, code: int, text: str) -> None:
        super().__init__(text)
        self.name = name
        self.code = code


@functools.cache
def driver() -> Any:
    """The bindings, initialised. Raises `CudaError`, `OSError` if there is no driver."""
    try:
        bindings = importlib.import_module("cuda.bindings.driver")
        result = bindings.cuInit(0)
    except (ImportError, RuntimeError) as error:
        raise OSError(
            f"the CUDA driver cannot be used: {error}; install NVIDIA's driver "
            f"(libcuda.so.1), and {remedy_for('gpu')} (drivers older than 580: "
            f"{remedy_for('gpu-cuda12')})"
        ) from error
    _check(bindings, "cuInit", result, "")
    return bindings


def call(name: str, *arguments: Any, of: str = "") -> Any:
    """What the driver's function returns: nothing, a value, or a tuple of values.

    Other Python threads run meanwhile. Raises `CudaError`, which says `of` what the call was.
    """
    bindings = driver()
    try:
        result = getattr(bindings, name)(*arguments)
    except RuntimeError as error:  # the bindings', for what an old driver does not have
        text = f"the CUDA driver has no {name}: {error}; update NVIDIA's driver"
        raise CudaError("CUDA_ERROR_NOT_FOUND", _NOT_FOUND, text) from error
    return _check(bindings, name, result, of)


class CudaContext:
    """The primary context of a device: the one that PyTorch and CuPy use, too."""

    def __init__(self, device: int) -> None:
        """Raises `CudaError` if there is no such device."""
        self.device = device
        self._ordinal = call("cuDeviceGet", device, of=f"device {device}")
        self._handle = call("cuDevicePrimaryCtxRetain", self._ordinal, of=f"device {device}")
        self._closing = threading.Lock()

    def use(self) -> None:
        """Make it the calling thread's; every thread has to, before its first call.

        Costs about what a Python call costs, so whether it was done is not remembered.
        """
        call("cuCtxSetCurrent", self._handle)

    def adopt_thread(self) -> None:
        """As `use`, once, for a thread of its own that captures no graph: it goes on as it would
        while another thread captures one."""
        self.use()
        call("cuThreadExchangeStreamCaptureMode", _relaxed_mode())

    def close(self) -> None:
        """Let go of it; idempotent. It lives on while another user needs it."""
        with self._closing:
            if self._handle is not None:
                self._handle = None
                call("cuDevicePrimaryCtxRelease", self._ordinal)


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Within, this thread may call what CUDA forbids while a graph is captured, by it or others.

    vLLM captures in the mode in which such a call of any thread fails and spoils the graph.
    """
    before = call("cuThreadExchangeStreamCaptureMode", _relaxed_mode())
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def _relaxed_mode() -> Any:
    return driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def _check(bindings: Any, name: str, result: tuple[Any, ...], of: str) -> Any:
    code, *values = result
    if code != bindings.CUresult.CUDA_SUCCESS:
        spelled = code.name if hasattr(code, "name") else f"CUDA error {int(code)}"
        _, why = bindings.cuGetErrorString(code)
        reason = f": {why.decode()}" if why else ""
        subject = f" of {of}" if of else ""
        raise CudaError(spelled, int(code), f"{spelled} from {name}{subject}{reason}")
    if len(values) == 1:
        return values[0]
    return tuple(values) or None
