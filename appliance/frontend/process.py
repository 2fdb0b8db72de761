"""The process of a front end, from its first frame to its end.

Started by the core with two sockets: frames go over one of them, connections come over the other.
It ends when the core closes the frames, or when it is draining and all requests are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from appliance.frontend.core import Core
from appliance.frontend.environment import import_vllm, prepare_environment
from appliance.http.cors import Cors
from appliance.platform.sandbox import Sandbox
from appliance.service import front_frames
from appliance.service.front_frames import Ping, Pong, Ready

if TYPE_CHECKING:
    from appliance.frontend.app import FrontEnd
    from appliance.frontend.batch_runs import BatchRuns
    from appliance.frontend.connections import Connections

SANDBOX: Final = Sandbox(writes=(Path(os.devnull),), programs=False, sockets=False)
"""It reads any file: models may be added that lie anywhere."""

log = logging.getLogger("appliance.frontend")


def main(frames: socket.socket, handover: socket.socket) -> int:
    """Serve until the core is gone or has drained this front end; returns the exit status."""
    prepare_environment()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the core ends its front ends
    import_vllm()
    SANDBOX.enter()  # before there is another thread, or a loop that has queues in the kernel
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(_serve(frames, handover))


async def _serve(frames: socket.socket, handover: socket.socket) -> int:
    core = Core()
    frames.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: core, frames)
    try:
        welcome = await core.greet()
    except ConnectionError:
        return 0
    if welcome.version != front_frames.VERSION:
        log.error(
            "the core speaks version %d of the frames, this front end %d: restart the appliance",
            welcome.version,
            front_frames.VERSION,
        )
        return 1
    from appliance.frontend.app import FrontEnd
    from appliance.frontend.batch_runs import BatchRuns
    from appliance.frontend.connections import Connections
    from appliance.frontend.ollama.routes import ollama_application
    from appliance.frontend.serving.engine_client import is_refusal
    from appliance.frontend.serving.model_fronts import ModelFronts

    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: not is_refusal(record))
    fronts = ModelFronts(core, welcome.models)
    ollama = ollama_application(
        fronts, strict=welcome.strict, keep_alive_seconds=welcome.keep_alive_seconds
    )
    front_end = FrontEnd(core, welcome, fronts, ollama)
    runs = BatchRuns(core, front_end.run, front_end.bodies)
    application = Cors(front_end, welcome.origins)
    connections = Connections(handover, application, welcome.root_path, welcome.most_in_use)
    core.on_catalogue = lambda catalogue: fronts.change(catalogue.models)
    core.on_run = runs.take
    await _until_over(core, front_end, connections, runs)
    return 0


async def _until_over(
    core: Core, front_end: FrontEnd, connections: Connections, runs: BatchRuns
) -> None:
    """Serve connections until the core is gone, or all is answered after it said so."""
    news = asyncio.Event()

    def answer_ping(ping: Ping) -> None:
        calls = front_end.calls + len(runs)
        pong = Pong(
            number=ping.number,
            connections=len(connections),
            calls=calls,
            large=front_end.large,
            bodies=tuple(front_end.bodies.coming()),
        )
        core.send(pong)

    def drain() -> None:
        front_end.draining = True
        connections.receive()  # what the core handed over before it said so
        connections.close_idle()
        news.set()

    core.on_ping = answer_ping
    core.on_drain = drain
    connections.on_lost = news.set
    runs.on_over = front_end.on_over = news.set
    connections.begin()
    core.send(Ready())
    log.info("a front end is ready")
    gone = asyncio.create_task(core.gone.wait())
    gone.add_done_callback(lambda _: news.set())
    while not gone.done():
        await news.wait()
        news.clear()
        if front_end.draining and not (connections or runs or front_end.calls):
            break
    gone.cancel()
    logging.getLogger("uvicorn.error").disabled = True  # of answers that end with the core
    connections.end()


def _new_loop() -> asyncio.AbstractEventLoop:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()
