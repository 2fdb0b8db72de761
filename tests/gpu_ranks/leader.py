"""The leader of two ranks, made as a worker makes it; prints a line of JSON for each stage.

python -m tests.gpu_ranks.leader CHECKPOINT...
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from appliance.engines.protocol import SequenceSpec
from appliance.memory.host_tier import HostTier
from appliance.platform.cpus import show_cpus
from appliance.platform.gpus import show_gpus
from appliance.worker import frames
from appliance.worker.engines import engines
from appliance.worker.tensor_parallel import lead, replicated

SLAB = 2 << 20
RANKS = 2
HOST_BYTES = 256 << 20


def main(paths: list[Path]) -> None:
    host = HostTier.create(HOST_BYTES)
    configuration = frames.Configure(
        version=frames.PROTOCOL_VERSION,
        instance=0,
        cpus=show_cpus(sorted(os.sched_getaffinity(0))),
        slabs=300,
        slab_bytes=SLAB,
        host_bytes=host.nbytes,
        models=[],
        device=show_gpus(range(RANKS)),
        runtime_slabs=704,
        ranks=RANKS,
    )
    daemon, kept = socket.socketpair()
    seat, followers = lead(configuration, host.fd, daemon)
    assert followers is not None
    build, _, swapper = engines(configuration, host, seat)
    own: list[Any] = []

    def build_own(model: frames.WorkerModel) -> Any:
        own.append(build(model))
        return own[-1]

    build_all = replicated(build_own, followers, swapper)
    tell("joined", communicators=communicators())
    taken = 0

    def places(count: int, nbytes: int) -> list[int]:
        nonlocal taken
        start = -(-taken // SLAB) * SLAB
        taken = start + count * nbytes
        return [start + number * nbytes for number in range(count)]

    for path in paths:
        engine = build_all(frames.WorkerModel(path.name, str(path), "bfloat16", 512, 4))
        engine.store_weights(places(engine.host_slabs, SLAB), fill=True)
        tell("built", graphs=graphs(own[-1]), communicators=communicators())
        tell("turned", tokens=turn(engine, swapper, places), communicators=communicators())
    kept.recv(1)  # for ever: the loss of the other rank ends this process


def turn(engine: Any, swapper: Any, places: Any) -> int:
    """One request, whose KV and whose weights leave in its midst; how many tokens it got."""
    from vllm import SamplingParams

    from appliance.engines.vllm.messages import encode_params

    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    engine.begin_load().wait()
    engine.add(
        SequenceSpec(
            request="r",
            model=engine.model,
            prompt=tuple(range(5, 69)),
            output=(),
            body=encode_params(params),
            prefix_salt="r",
        )
    )
    made = len(engine.prefill("r", 1 << 20))
    made += sum([len(engine.step(["r"], 1 << 20)) for _ in range(3)])
    away = places(engine.kv.blocks(512), engine.kv.block_bytes)
    engine.swap_out("r", away)
    swapper.settle()
    engine.trim(0)
    engine.evict_weights()
    engine.begin_load()
    engine.swap_in("r", away, 1 << 20)
    made += sum([len(engine.step(["r"], 1 << 20)) for _ in range(3)])
    engine.forget("r")
    swapper.settle()
    engine.trim(0)
    engine.evict_weights()
    return made


def graphs(engine: Any) -> int:
    """How many this rank has captured for the engine."""
    return len(engine._runner.model.concrete_cudagraph_entries)


def communicators() -> int:
    """How many this instance has made, one line for each rank."""
    return len(Path(os.environ["PRETEND_COMMUNICATORS"]).read_text().splitlines())


def tell(stage: str, **more: object) -> None:
    sys.stdout.write(json.dumps({"stage": stage, **more}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main([Path(path) for path in sys.argv[1:]])
