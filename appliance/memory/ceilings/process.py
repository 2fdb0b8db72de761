"""The process that measures one device, and how it is asked.

    python -m appliance.memory.ceilings.process     reads a `Task` from standard input

A process of its own for each device: it sees one GPU only, as a worker does; what it took is gone
with it, also after an error that breaks a context; and it is ended if a driver never answers.
Copies need an environment that is set before a process starts, too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from appliance.errors import CeilingsError
from appliance.memory import mapping
from appliance.memory.ceilings.copies import measure_host
from appliance.memory.ceilings.disk import DiskRate, file_systems, measure_disk
from appliance.memory.ceilings.stored import MemoryCeilings
from appliance.platform.children import (
    WORKER_OOM_SCORE,
    forbid_core_dumps,
    go_before_the_daemon,
    module_command,
    without_secrets,
)
from appliance.platform.gpus import GpusUnknown, Link, read_link
from appliance.platform.numa import read_nodes, stay_near

MODULE: Final = "appliance.memory.ceilings.process"
PATIENCE_SECONDS: Final = 60.0
"""For a driver that begins, and for memory that is made and given back, besides measuring."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `gpu` is NVML's number; without one it is the memory of the host, and the
    disks that have weights of models in `folders`."""

    nbytes: int
    """Of host memory, and of the device's, that are taken."""
    slab_bytes: int
    seconds: float
    gpu: int | None = None
    node: int | None = None
    """The NUMA node that the device is on, where there are several."""
    folders: tuple[str, ...] = ()


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, or why it could not be."""

    memory: MemoryCeilings | None = None
    link: tuple[int, int] | None = None
    """Generation and lanes of the PCIe link during copies."""
    disks: Mapping[str, DiskRate] = {}
    error: str = ""


def ask(
    task: Task, environment: Mapping[str, str], patience_seconds: float = PATIENCE_SECONDS
) -> Result:
    """Have a process measure. Raises `CeilingsError` if it cannot, or does not answer in time."""
    try:
        done = subprocess.run(
            module_command(MODULE),
            input=msgspec.json.encode(task),
            capture_output=True,
            env=process_environment(task, environment),
            timeout=task.seconds + patience_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CeilingsError(f"no answer in {error.timeout:g} s; see the kernel's log") from None
    except OSError as error:
        raise CeilingsError(f"no process could be started: {error}") from None
    try:
        result = msgspec.json.decode(done.stdout, type=Result)
    except msgspec.MsgspecError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing said"]
        raise CeilingsError(f"the process ended with {done.returncode}: {last[0]}") from None
    if result.error:
        raise CeilingsError(result.error)
    return result


def process_environment(task: Task, inherited: Mapping[str, str]) -> dict[str, str]:
    """That of the process: as a worker's, which sees one GPU by NVML's number."""
    found = mapping.environment(without_secrets(inherited))
    if task.gpu is not None:
        found |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(task.gpu)}
    return found


def measure(task: Task) -> Result:
    """Do it, in this process."""
    try:
        if task.gpu is not None:
            return _measure_gpu(task, task.gpu)
        memory = measure_host(task.nbytes, task.slab_bytes, task.seconds)
        return Result(memory=memory, disks=_measure_disks([Path(one) for one in task.folders]))
    except (OSError, ValueError) as error:
        return Result(error=str(error))


def _measure_gpu(task: Task, number: int) -> Result:
    from appliance.memory.cuda.ceilings import measure_gpu

    nodes = read_nodes()
    if task.node is not None and task.node in nodes:
        stay_near(nodes[task.node], nodes)
    links: list[Link | None] = []

    def look() -> None:
        try:
            links.append(read_link(number))
        except GpusUnknown:  # copies were measured: the link is shown besides
            links.append(None)

    memory = measure_gpu(0, task.nbytes, task.slab_bytes, task.seconds, look)
    return Result(memory=memory, link=links[0])


def _measure_disks(folders: Sequence[Path]) -> dict[str, DiskRate]:
    return {str(folder): measure_disk(files) for folder, files in file_systems(folders).items()}


def main() -> None:
    """Read the task, and write the result to standard output."""
    go_before_the_daemon(WORKER_OOM_SCORE)
    forbid_core_dumps()
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    sys.stdout.buffer.write(msgspec.json.encode(measure(task)))


if __name__ == "__main__":
    main()
