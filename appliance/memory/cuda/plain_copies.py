"""Copies as the driver does them at best: asynchronous, on streams of their own, with no events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from appliance.memory.cuda.driver import CudaContext, call, driver


def plain_copies(
    context: CudaContext,
    work: Sequence[Sequence[tuple[int, int]]],
    nbytes: int,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Copies of `nbytes` each, to a destination from a source, on a stream of its own for every
    list; returns when all are done. `meanwhile` is called when all are in line. Raises `CudaError`;
    what was in line is waited for then."""
    context.use()
    with ExitStack() as streams:
        for places in work:
            stream = call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
            streams.callback(call, "cuStreamDestroy", stream)
            streams.callback(call, "cuStreamSynchronize", stream)
            for destination, source in places:
                call("cuMemcpyAsync", destination, source, nbytes, stream, of=f"{nbytes} bytes")
        if meanwhile is not None:
            meanwhile()
