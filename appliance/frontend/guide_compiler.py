"""The process in which guides are compiled first: one that ends its compiler harms no other.

A guide comes from a client, and the parsers of guides are native code that recurses: a chain of a
few thousand rules overflows the stack. Front ends therefore do not look at guides, and workers get
only those that were compiled here. The stack is half of a worker's, so that what fits here fits
there; memory is bounded, too. A guide that takes the process over finds little: the process is in
a sandbox, which has no network, no programs, and no files but those of models and libraries.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from vllm import envs

from appliance import framing
from appliance.engines.protocol import GuideRefused
from appliance.engines.vllm.guides import GuideCompiler
from appliance.engines.vllm.messages import BadMessage, decode_guide
from appliance.frontend.serving.model_fronts import arguments, configuration
from appliance.platform.sandbox import Sandbox, checkpoint_files, interpreter_files
from appliance.service.front_frames import FrontModel
from appliance.service.guide_frames import (
    CompileGuide,
    CompilerReady,
    FromCompiler,
    GuideCompiled,
    ModelKnown,
    ReadFolders,
    ToCompiler,
    decoder_for_compiler,
)

STACK_BYTES: Final = 4 << 20
"""A worker compiles in threads that have 8 MiB."""
MEMORY_BYTES: Final = 4 << 30
"""Of address space, on top of what is imported."""
KEPT_MODELS: Final = 4
"""Whose tokenizers stay loaded."""
NICENESS: Final = 5
READ_BYTES: Final = 1 << 16


def main(frames: socket.socket) -> int:
    """Compile what the core sends until it is gone; returns the exit status."""
    os.nice(NICENESS)
    _bound_memory()
    orders = _orders(frames)
    first = next(orders, None)
    if first is None:
        return 0
    if not isinstance(first, ReadFolders):
        raise TypeError(f"expected the folders of models first, got {first!r}")
    _sandbox(first.folders).enter()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_Compiler(frames).run, args=(orders,), name="guides")
    thread.start()
    thread.join()
    return 0


def _sandbox(folders: Iterable[str]) -> Sandbox:
    """To be entered before the first thread begins."""
    models = [file for folder in folders for file in checkpoint_files(Path(folder))]
    remembered = Path(envs.VLLM_CACHE_ROOT) / "modelinfos"  # of classes of models
    reads = (*interpreter_files(), remembered, *models)
    return Sandbox(reads=reads, writes=(Path(os.devnull),), programs=False, sockets=False)


def _orders(frames: socket.socket) -> Iterator[ToCompiler]:
    """Until the core is gone."""
    decoder = decoder_for_compiler()
    with contextlib.suppress(ConnectionError):
        while data := frames.recv(READ_BYTES):
            yield from decoder.feed(data)


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


class _Compiler:
    """One guide after the other."""

    def __init__(self, frames: socket.socket) -> None:
        self._frames = frames
        self._known: OrderedDict[tuple[str, int], GuideCompiler] = OrderedDict()
        """By path and time of creation: another model may come to lie at a path."""

    def run(self, orders: Iterable[ToCompiler]) -> None:
        with contextlib.suppress(ConnectionError):
            self._send(CompilerReady())
            for order in orders:
                if isinstance(order, CompileGuide):
                    self._send(self._compile(order))

    def _send(self, frame: FromCompiler) -> None:
        self._frames.sendall(framing.encode(frame))

    def _compile(self, order: CompileGuide) -> GuideCompiled:
        try:
            compiler = self._compiler(order.model)
        except Exception as error:  # whatever the checkpoint's files cause
            return GuideCompiled(order.number, failed=f"{type(error).__name__}: {error}")
        self._send(ModelKnown(order.number))
        try:
            guide = decode_guide(order.guide)
            compiler.check(guide)
            compiler.compile(guide)
        except (GuideRefused, BadMessage) as error:
            return GuideCompiled(order.number, refused=str(error))
        return GuideCompiled(order.number)

    def _compiler(self, model: FrontModel) -> GuideCompiler:
        """What compiles the model's guides, ready for the first."""
        key = (model.path, model.created)
        if key not in self._known:
            compiler = GuideCompiler(configuration(arguments(model)))
            _ = compiler.masks  # loads the tokenizer
            self._known[key] = compiler
            if len(self._known) > KEPT_MODELS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]
