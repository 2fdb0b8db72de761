"""Writing images to disk in the background, by a process of the lowest priority.

The image is read from the host tier, which may give its slabs to others meanwhile. Every unit is
compared with its digest before it is written, so what is written is the image, or nothing.

Started as ``python -m appliance.memory.weight_cache.image_writer HOST_FD``, with the job on
standard input; says what went wrong on standard error. It ends with the process that started it,
and what it leaves unwhole is removed at the next start.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from appliance.memory.host_tier import HostTier
from appliance.memory.weight_cache.image_file import (
    DIGEST_BYTES,
    UNIT_BYTES,
    Head,
    digest,
    locked,
    unwhole,
)
from appliance.memory.weight_cache.pipeline import process_cpus
from appliance.platform.children import module_command, without_secrets
from appliance.platform.durable import sync

SYNCED_BYTES: Final = 64 << 20
"""So much at most waits for the disk: it should not keep other files' writers waiting."""

_PR_SET_PDEATHSIG: Final = 1

log = logging.getLogger("appliance.memory.weight_cache.image_writer")


class Job(msgspec.Struct, frozen=True):
    """An image in the host tier, in slabs at `offsets` in order, that is to be the file `path`."""

    path: str
    head: Head
    digests: bytes
    slab_bytes: int
    offsets: list[int]


class ImageWriter:
    """Has images written one after the other, each by a process of its own, in the background."""

    def __init__(self, host: HostTier) -> None:
        self._host_fd = host.fd
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Returns at once. That it did not work out is logged, and nothing more."""
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="image-writer", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Return when all of them are written, or are not going to be."""
        self._jobs.join()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, process_cpus())  # of this thread, and of what it starts
        while True:
            job = self._jobs.get()
            try:
                self._write(job)
            except Exception:
                log.exception("the packed weights are not kept in %s", job.path)
            finally:
                self._jobs.task_done()

    def _write(self, job: Job) -> None:
        ended = subprocess.run(
            module_command("appliance.memory.weight_cache.image_writer", str(self._host_fd)),
            input=msgspec.msgpack.encode(job),
            pass_fds=(self._host_fd,),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=without_secrets(os.environ),
            check=False,
        )
        if ended.returncode:
            reason = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            log.warning("the packed weights are not kept in %s: %s", job.path, reason)


def write_image(job: Job, host_fd: int) -> bool:
    """Write the image of a job, unless another process does, or did; whether there was a need.

    The file has its name when all of it is on the disk. Raises `OSError` for a disk that is full
    and the like, and `LookupError` if the image is no longer where it was; nothing is left then.
    """
    path = Path(job.path)
    part = unwhole(path)
    with locked(part) as fd:
        if fd is None:
            return False
        try:
            wanted = not job.head.begins(path)
            if wanted:
                _fill(job, host_fd, fd)
                part.rename(path)
            else:
                part.unlink()
        except BaseException:
            part.unlink()
            raise
    if not wanted:
        return False
    sync(path.parent)
    return True


def _fill(job: Job, host_fd: int, fd: int) -> None:
    """Write all of a file that may hold anything."""
    head = job.head
    os.ftruncate(fd, 0)
    os.posix_fallocate(fd, 0, head.file_bytes)  # a disk without room says so now
    _write_all(fd, memoryview(head.start + job.digests), 0)
    unit = memoryview(bytearray(UNIT_BYTES))
    for number, start in enumerate(range(0, head.nbytes, UNIT_BYTES)):
        size = min(UNIT_BYTES, head.nbytes - start)
        end = start
        for place, nbytes in _parts(job, start, size):
            end += os.preadv(host_fd, [unit[end - start :][:nbytes]], place)
        expected = job.digests[number * DIGEST_BYTES :][:DIGEST_BYTES]
        if end != start + size or digest([unit[:size]]) != expected:
            raise LookupError("the weights have left the host cache meanwhile")
        _write_all(fd, unit[:size], head.image_offset + start)
        if (start + size) // SYNCED_BYTES > start // SYNCED_BYTES:
            os.fdatasync(fd)
    os.fsync(fd)


def _parts(job: Job, start: int, size: int) -> Iterator[tuple[int, int]]:
    """Where in the host tier these bytes of the image are: offsets and sizes, in order."""
    end = start + size
    while start < end:
        slab, inside = divmod(start, job.slab_bytes)
        nbytes = min(end - start, job.slab_bytes - inside)
        yield job.offsets[slab] + inside, nbytes
        start += nbytes


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def main(arguments: list[str]) -> None:
    """Carry out the job on standard input, with the inherited descriptor of the host tier."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(19)  # and so for the disk; less would be never, on processors that are never idle
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    try:
        write_image(job, int(arguments[0]))
    except (OSError, LookupError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main(sys.argv[1:])
