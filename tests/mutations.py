"""``python -m tests.mutations``: faults put into the memory's sources, each of which a test finds.

It copies the sources, puts one fault after the other into the copy, and runs the test that has to
fail for it; first it runs all of these tests on the sources as they are. Run it by hand after a
change of `appliance/memory`, with words of the names to run only some: all take some eight minutes.
`tests/unit/test_mutations.py` checks that every fault can still be put in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
COPIED: Final = ("appliance", "tests", "benchmarks", "pyproject.toml")
LIMIT_SECONDS: Final = 60
"""For each test of a run. One that hangs with a fault, and passes without it, has found it."""

MEMORY: Final = "appliance/memory"
TESTS: Final = "tests/unit/memory"
FAILURES: Final = f"{TESTS}/cuda/test_failures.py"
STREAMS: Final = f"{TESTS}/cuda/test_streams.py"


class Mutation(NamedTuple):
    """One fault."""

    name: str
    """What is wrong, as the table in ``docs/gpu.md`` has it."""
    file: str
    old: str
    """Occurs once in the file."""
    new: str
    test: str
    """The test that must fail, as pytest names it."""


MUTATIONS: Final = (
    # What the audit before the first GPU found, put back.
    Mutation(
        "a copy whose mark was refused is not waited for",
        f"{MEMORY}/cuda/streams.py",
        '                call("cuStreamSynchronize", self._handle)',
        "                pass",
        f"{FAILURES}::test_transfers",
    ),
    Mutation(
        "the waits for copies spoil a capture",
        f"{MEMORY}/cuda/streams.py",
        "            self._context.adopt_thread()",
        "            self._context.use()",
        f"{STREAMS}::test_neither_pinning_nor_copies_spoil_a_capture",
    ),
    Mutation(
        "page-locking spoils a capture",
        f"{MEMORY}/cuda/pinning.py",
        "self._context.adopt_thread()",
        "self._context.use()",
        f"{STREAMS}::test_neither_pinning_nor_copies_spoil_a_capture",
    ),
    Mutation(
        "a thread adopts the wrong capture mode",
        f"{MEMORY}/cuda/driver.py",
        "return driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED",
        "return driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL",
        f"{STREAMS}::test_neither_pinning_nor_copies_spoil_a_capture",
    ),
    Mutation(
        "the capture mode is not put back",
        f"{MEMORY}/cuda/driver.py",
        '        call("cuThreadExchangeStreamCaptureMode", before)',
        "        pass",
        f"{TESTS}/cuda/test_stand_in.py::test_relaxed_is_for_the_time_of_the_context",
    ),
    Mutation(
        "memory given back during a capture is waited for at once",
        f"{MEMORY}/cuda/allocator.py",
        "if self._capturing():",
        "if False:",
        f"{FAILURES}::test_runtime_memory",
    ),
    Mutation(
        "memory is unmapped under running kernels",
        f"{MEMORY}/cuda/allocator.py",
        '            call("cuCtxSynchronize")\n',
        "",
        f"{FAILURES}::test_runtime_memory",
    ),
    Mutation(
        "memory whose return was refused is forgotten",
        f"{MEMORY}/cuda/allocator.py",
        "                    self._leaving.append(address)\n                    raise",
        "                    raise",
        f"{FAILURES}::test_runtime_memory",
    ),
    Mutation(
        "runtime memory is charged and never given back",
        f"{MEMORY}/runtime.py",
        '''that `charge` counted."""
        self.used -= slabs''',
        '''that `charge` counted."""''',
        f"{TESTS}/test_runtime.py::test_slabs_mapped_elsewhere_count",
    ),
    Mutation(
        "groups of KV waste what a slab wastes",
        f"{MEMORY}/kv_pool.py",
        "WASTE: Final = 0.05",
        "WASTE: Final = 0.5",
        f"{TESTS}/test_kv_pool.py::test_groups_of_a_gpu_waste_little",
    ),
    Mutation(
        "pages are made by the driver, while all calls wait",
        f"{MEMORY}/cuda/pinning.py",
        "mapping.populate(self._address + start, size)",
        "pass",
        f"{FAILURES}::test_pages_are_made_before_they_are_locked",
    ),
    # Waits.
    Mutation(
        "KV does not wait for compute",
        f"{MEMORY}/cuda/streams.py",
        "        if job.computed is not None:",
        "        if False:",
        f"{STREAMS}::test_kv_comes_after_the_compute_before_it",
    ),
    Mutation(
        "a transfer does not wait for those of other streams",
        f"{MEMORY}/cuda/streams.py",
        "            self._flights.follow(earlier, self._handle)",
        "            pass",
        f"{STREAMS}::test_a_transfer_waits_on_the_device",
    ),
    Mutation(
        "a transfer ends before those it comes after",
        f"{MEMORY}/cuda/streams.py",
        """        for earlier in (*job.after, *job.needs):
            earlier.join()""",
        "        pass",
        f"{STREAMS}::test_a_cancelled_transfer_ends_after_those_before_it",
    ),
    Mutation(
        "what a failed copy left counts as landed",
        f"{MEMORY}/cuda/streams.py",
        "job.error, job.broken = job.error or error, True",
        "pass",
        f"{STREAMS}::test_a_refused_call_fails_its_transfer",
    ),
    Mutation(
        "a wait for another process that was refused is forgotten",
        f"{MEMORY}/cuda/streams.py",
        '                call("cuEventSynchronize", foreign)  # this thread can wait instead',
        "                pass",
        f"{FAILURES}::test_events_between_processes",
    ),
    Mutation(
        "transfers go ahead of an order that cannot be kept",
        f"{MEMORY}/cuda/streams.py",
        "            raise self._disordered",
        "            pass",
        f"{FAILURES}::test_an_order_that_cannot_be_kept",
    ),
    Mutation(
        "a thread that was refused the context once has none for ever",
        f"{MEMORY}/cuda/streams.py",
        "            self._context.adopt_thread()\n            self._done = True",
        "            self._done = True\n            self._context.adopt_thread()",
        f"{FAILURES}::test_threads_that_were_refused_the_context",
    ),
    Mutation(
        "a stream waits for the first piece of a transfer only",
        f"{MEMORY}/cuda/events.py",
        "flight.marks[-1][1]",
        "flight.marks[0][1]",
        f"{STREAMS}::test_all_pieces_are_waited_for",
    ),
    Mutation(
        "compute waits for fewer bytes than it reads",
        f"{MEMORY}/cuda/events.py",
        "if end >= wanted), None)",
        "), None)",
        f"{STREAMS}::test_compute_waits_on_the_device",
    ),
    Mutation(
        "compute goes on before its bytes are in line",
        f"{MEMORY}/cuda/events.py",
        "flight.issued >= wanted and nbytes is not None",
        "nbytes is not None",
        f"{STREAMS}::test_compute_waits_until_its_bytes_are_in_line",
    ),
    Mutation(
        "the pool's own copies do not wait for compute",
        f"{MEMORY}/cuda/vmm.py",
        '            call("cuStreamWaitEvent", self._copies, self._computed, 0)\n',
        "",
        f"{STREAMS}::test_the_pool_copies_after_compute",
    ),
    Mutation(
        "a copy that fails half way leaves its first half in line",
        f"{MEMORY}/cuda/vmm.py",
        "            finally:  # also of parts before one that was refused\n",
        "            except ZeroDivisionError:\n                pass\n            else:\n",
        f"{FAILURES}::test_a_copy_that_fails_half_way",
    ),
    Mutation(
        "a writer does not wait for readers",
        f"{MEMORY}/hazards.py",
        "                after |= use.readers\n",
        "",
        f"{TESTS}/test_swapper.py::test_reading_comes_after_writing_and_writing_after_everything",
    ),
    Mutation(
        "transfers of the swapper wait for no other",
        f"{MEMORY}/swapper.py",
        "after=order.after, needs=order.needs",
        "after=(), needs=order.needs",
        f"{TESTS}/test_swapper.py::test_random_transfers_end_as_if_done_one_by_one",
    ),
    Mutation(
        "transfers of the swapper read what never came",
        f"{MEMORY}/swapper.py",
        "after=order.after, needs=order.needs",
        "after=(*order.after, *order.needs), needs=()",
        f"{TESTS}/test_swapper.py"
        "::test_a_failed_copy_fails_its_readers_and_its_place_is_written_again",
    ),
    Mutation(
        "settling does not wait",
        f"{MEMORY}/swapper.py",
        "            transfer.join()\n",
        "",
        f"{TESTS}/test_swapper.py::test_settling_some_leaves_the_others",
    ),
    # Books.
    Mutation(
        "a reaped transfer stays in the book",
        f"{MEMORY}/swapper.py",
        "        self._book.leave(transfer)\n        if then",
        "        if then",
        f"{TESTS}/test_swapper.py::test_what_follows_runs_when_reaped_and_only_once",
    ),
    Mutation(
        "streams of a swapper that could not be made go on",
        f"{MEMORY}/swapper.py",
        "                made.close()",
        "                pass",
        f"{FAILURES}::test_streams_that_cannot_be_made",
    ),
    Mutation(
        "only the first slab of a run is accessible",
        f"{MEMORY}/cuda/vmm.py",
        'call("cuMemSetAccess", address, count * size,',
        'call("cuMemSetAccess", address, size,',
        f"{TESTS}/cuda/test_same_vmm.py::TestVmm::test_a_run_of_slabs_is_one_piece_of_memory",
    ),
    Mutation(
        "a mapping that fails half way stays",
        f"{MEMORY}/cuda/vmm.py",
        "                self.unmap(address, done)",
        "                pass",
        f"{FAILURES}::test_regions",
    ),
    Mutation(
        "slabs are unmapped twice when the first attempt fails",
        f"{MEMORY}/cuda/vmm.py",
        "            if place in self._mapped:  # else a call before that failed took it away",
        "            if True:",
        f"{FAILURES}::test_regions",
    ),
    Mutation(
        "a range is given back with its slabs in it",
        f"{MEMORY}/cuda/vmm.py",
        "        self.unmap(address, size // self.slab_bytes)\n",
        "        self.context.use()\n",
        f"{TESTS}/cuda/test_same_vmm.py::TestVmm::test_release_takes_what_is_mapped_along",
    ),
    Mutation(
        "a pool that could not be made keeps its stream",
        f"{MEMORY}/cuda/vmm.py",
        "        self._computed: Any = None\n",
        "",
        f"{FAILURES}::test_a_pool_that_cannot_be_made",
    ),
    Mutation(
        "a region that could not be released is forgotten",
        f"{MEMORY}/arena.py",
        """            self._give_back(region, list(region._slabs))
            self._vacated.clear_within(region.address, region.slots * self.slab_bytes)
            self.vmm.release(region.address, region.slots * self.slab_bytes)
            self._regions.remove(region)""",
        """            self._regions.remove(region)
            self._give_back(region, list(region._slabs))
            self._vacated.clear_within(region.address, region.slots * self.slab_bytes)
            self.vmm.release(region.address, region.slots * self.slab_bytes)""",
        f"{FAILURES}::test_regions",
    ),
    Mutation(
        "slabs of a mapping that failed are lost",
        f"{MEMORY}/arena.py",
        "                self._give_back(region, slots)\n                raise",
        "                raise",
        f"{TESTS}/test_arena.py::test_failure_half_way_maps_nothing",
    ),
    Mutation(
        "memory that could not be taken stays counted",
        f"{MEMORY}/runtime.py",
        """        except BaseException:
            self.used -= slabs
            raise""",
        """        except BaseException:
            raise""",
        f"{FAILURES}::test_runtime_memory",
    ),
    Mutation(
        "memory is no longer counted before it is given back",
        f"{MEMORY}/runtime.py",
        """        region.release()
        del self._regions[address]
        self.used -= region.slots""",
        """        del self._regions[address]
        self.used -= region.slots
        region.release()""",
        f"{FAILURES}::test_runtime_memory",
    ),
    Mutation(
        "a null block that could not be mapped stays counted",
        f"{MEMORY}/runtime.py",
        "            self.discharge(len(slots))\n            raise",
        "            raise",
        f"{FAILURES}::test_runtime_memory",
    ),
    Mutation(
        "runtime memory may take one slab too many",
        f"{MEMORY}/runtime.py",
        "if self.used + slabs > self.slabs:",
        "if self.used + slabs > self.slabs + 1:",
        f"{TESTS}/test_runtime.py::test_memory_is_taken_and_given_back",
    ),
    Mutation(
        "events of a transfer are not used again",
        f"{MEMORY}/cuda/streams.py",
        "        for event in (job.start, job.computed):\n            if event is not None:",
        "        for event in (job.start, job.computed):\n            if False:",
        f"{FAILURES}::test_transfers",
    ),
    Mutation(
        "an event for another process is lost when its handle is refused",
        f"{MEMORY}/cuda/events.py",
        """            with contextlib.suppress(CudaError):
                self.close()
            raise""",
        "            raise",
        f"{FAILURES}::test_events_between_processes",
    ),
    Mutation(
        "copies cross from one page-locked chunk to the next",
        f"{MEMORY}/cuda/pinning.py",
        "min(self._chunk_bytes - past % self._chunk_bytes, self.nbytes - past)",
        "self.nbytes - past",
        f"{STREAMS}::test_the_host_tier_is_pinned_in_chunks",
    ),
    Mutation(
        "page-locked memory is not let go",
        f"{MEMORY}/cuda/pinning.py",
        '                call("cuMemHostUnregister", self._address + start)',
        "                pass",
        f"{STREAMS}::test_the_host_tier_is_pinned_in_chunks",
    ),
    Mutation(
        "the scratch slab stays under an owner's addresses",
        f"{MEMORY}/cuda/scratch.py",
        "            self._vmm.unmap(address, slots)",
        "            pass",
        f"{TESTS}/cuda/test_scratch.py::test_a_region_without_memory_can_be_touched",
    ),
    Mutation(
        "scratch that could not be mapped whole stays in part",
        f"{MEMORY}/cuda/scratch.py",
        "            self._vmm.unmap(address, covered // self._vmm.slab_bytes)\n",
        "",
        f"{FAILURES}::test_scratch_that_cannot_be_mapped",
    ),
    # What a second reading found.
    Mutation(
        "a cancelled transfer whose wait was refused ends with a copy in line",
        f"{MEMORY}/cuda/streams.py",
        "        if job.broken or isinstance(job.error, CudaError):",
        "        if isinstance(job.error, CudaError):",
        f"{FAILURES}::test_a_cancelled_transfer_whose_wait_is_refused",
    ),
    Mutation(
        "a stream stays when the context is refused at its end",
        f"{MEMORY}/cuda/streams.py",
        """        self._events.close()
        with contextlib.suppress(CudaError):
            call("cuStreamDestroy", self._handle)""",
        """            self._events.close()
            call("cuStreamDestroy", self._handle)""",
        f"{FAILURES}::test_closing_goes_on",
    ),
    Mutation(
        "memory stays page-locked when the context is refused",
        f"{MEMORY}/cuda/pinning.py",
        '''                self._context.use()
            with contextlib.suppress(CudaError):
                call("cuMemHostUnregister"''',
        '''                self._context.use()
                call("cuMemHostUnregister"''',
        f"{FAILURES}::test_closing_goes_on",
    ),
    Mutation(
        "an event for another process is lost when its destruction is refused",
        f"{MEMORY}/cuda/events.py",
        """            call("cuEventDestroy", self.event)
            self.event = None""",
        """            event, self.event = self.event, None
            call("cuEventDestroy", event)""",
        f"{FAILURES}::test_an_event_whose_destruction_is_refused",
    ),
    Mutation(
        "scratch whose return was refused is forgotten",
        f"{MEMORY}/cuda/scratch.py",
        """            address, size = next(iter(self._ranges.items()))
            self._vmm.release(address, size)
            del self._ranges[address]""",
        """            address, size = self._ranges.popitem()
            self._vmm.release(address, size)""",
        f"{FAILURES}::test_scratch_that_cannot_be_given_back",
    ),
    Mutation(
        "scratch whose return was refused keeps its context",
        f"{MEMORY}/cuda/scratch.py",
        """        finally:
            self._vmm.close()""",
        """        except ZeroDivisionError:
            pass
        else:
            self._vmm.close()""",
        f"{FAILURES}::test_scratch_that_cannot_be_given_back",
    ),
    Mutation(
        "torch gets no memory while some waits to be returned",
        f"{MEMORY}/cuda/allocator.py",
        "if self._capturing() or not self._leaving:",
        "if True:",
        f"{FAILURES}::test_torch_gets_what_it_gave_back",
    ),
    Mutation(
        "a graph is spoilt by returning memory to take some",
        f"{MEMORY}/cuda/allocator.py",
        "if self._capturing() or not self._leaving:",
        "if not self._leaving:",
        f"{FAILURES}::test_torch_gets_what_it_gave_back",
    ),
    Mutation(
        "a slot whose mapping could not be taken back is lost",
        f"{MEMORY}/cuda/vmm.py",
        "        for place in self._left.intersection(places):",
        "        for place in ():",
        f"{FAILURES}::test_a_slot_whose_mapping_stayed_can_be_mapped",
    ),
    Mutation(
        "a region is released twice",
        f"{MEMORY}/arena.py",
        "            if region not in self._regions:",
        "            if False:",
        f"{TESTS}/test_arena.py::test_a_region_is_released_once",
    ),
    # Slabs that are unmapped by another thread than the one that computes.
    Mutation(
        "a vacated slab is mapped while it lies elsewhere",
        f"{MEMORY}/arena.py",
        "        self._vacated.clear_for(map(region.slot_address, slots), slabs)\n",
        "        self._vacated.clear_for(map(region.slot_address, slots), ())\n",
        f"{TESTS}/test_arena.py::test_many_slabs_are_vacated_without_waiting",
    ),
    Mutation(
        "an address gets a slab while a vacated one lies there",
        f"{MEMORY}/arena.py",
        "        self._vacated.clear_for(map(region.slot_address, slots), slabs)\n",
        "        self._vacated.clear_for((), slabs)\n",
        f"{TESTS}/test_arena.py::test_an_address_is_unmapped_before_another_slab_comes_there",
    ),
    Mutation(
        "a mapping does not wait for what is being unmapped",
        f"{MEMORY}/vacated.py",
        "            for first, count in self._runs(sorted(wanted - self._busy)):",
        "            for first, count in self._runs(sorted(wanted)):",
        f"{TESTS}/test_arena.py::test_many_slabs_are_vacated_without_waiting",
    ),
    Mutation(
        "vacated slabs are taken before others",
        f"{MEMORY}/arena.py",
        """        slabs = self._take(min(count, self._counts[_FREE]), _FREE)
        return slabs + self._take(count - len(slabs), _VACATED)""",
        """        slabs = self._take(min(count, self._counts[_VACATED]), _VACATED)
        return slabs + self._take(count - len(slabs), _FREE)""",
        f"{TESTS}/test_arena.py::test_many_slabs_are_vacated_without_waiting",
    ),
    Mutation(
        "the thread that computes unmaps what it evicts",
        f"{MEMORY}/weights.py",
        "        self.region.vacate(range(self.region.slots))",
        "        self.region.unmap(range(self.region.slots))",
        f"{TESTS}/test_weights.py::test_a_switch_maps_and_unmaps_nothing_itself",
    ),
    Mutation(
        "the thread that computes maps what is read from files",
        f"{MEMORY}/weights.py",
        "        self.region.set_aside(range(self.region.slots))\n",
        "        self.region.map(range(self.region.slots))\n"
        "        self.region._aside.update(range(self.region.slots))\n",
        f"{TESTS}/test_weights.py::test_a_switch_maps_and_unmaps_nothing_itself",
    ),
    Mutation(
        "what the driver refused to unmap counts as unmapped",
        f"{MEMORY}/vacated.py",
        "                if unmapped:\n",
        "                if True:\n",
        f"{TESTS}/test_arena.py::test_what_cannot_be_unmapped_is_tried_again",
    ),
    Mutation(
        "the thread that unmaps is not made ready for the driver",
        f"{MEMORY}/vacated.py",
        "            self._vmm.adopt_thread()\n",
        "            pass\n",
        f"{TESTS}/test_arena.py::test_the_unmapping_thread_is_made_ready_first",
    ),
    Mutation(
        "a range is given back with vacated slabs in it",
        f"{MEMORY}/arena.py",
        "            self._vacated.clear_within(region.address, region.slots * self.slab_bytes)\n",
        "",
        f"{TESTS}/test_arena.py::test_a_region_is_released_with_what_was_vacated",
    ),
    # Host memory.
    Mutation(
        "vacated host memory can still be touched",
        f"{MEMORY}/mapping.py",
        "    _mmap(address, nbytes, NO_ACCESS, flags, -1, 0)\n\n\ndef map_file",
        "    _mmap(address, nbytes, READ_WRITE, flags, -1, 0)\n\n\ndef map_file",
        f"{TESTS}/test_vmm.py::test_unmapped_addresses_fault",
    ),
    Mutation(
        "rows are copied with the pitches swapped",
        f"{MEMORY}/mapping.py",
        "_rows(destination, nbytes, rows, destination_pitch)",
        "_rows(destination, nbytes, rows, source_pitch)",
        f"{TESTS}/cuda/test_same_streams.py::TestStreams::test_rows",
    ),
    Mutation(
        "reserved host addresses are not aligned",
        f"{MEMORY}/mapping.py",
        "    address = -(-start // alignment) * alignment\n",
        "    address = start\n",
        f"{TESTS}/test_vmm.py::test_reserved_addresses_are_aligned_and_all_there",
    ),
)


def put_in(mutation: Mutation, root: Path) -> str:
    """Put the fault into the sources at `root`; the file's text before. Raises `ValueError` if its
    place is not there, or is there twice."""
    path = root / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.name}: {mutation.file} has it {text.count(mutation.old)} times"
        )
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return text


def run(tests: list[str], root: Path) -> str:
    """``passed``, ``failed``, or ``hung``. Raises `RuntimeError` for tests that do not exist."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_SECONDS * len(tests),
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode in (0, 1) or done.returncode < 0:
        return "failed" if done.returncode else "passed"
    raise RuntimeError(f"{tests}: {done.stdout}{done.stderr}")


def look_for(mutation: Mutation, root: Path) -> str:
    """What became of the fault: ``failed`` or ``hung``, by which its test found it, ``MISSED``, or
    ``slow`` for a test that hangs without the fault, too. The sources are as before."""
    before = put_in(mutation, root)
    try:
        outcome = run([mutation.test], root)
    finally:
        (root / mutation.file).write_text(before, encoding="utf-8")
    if outcome == "hung" and run([mutation.test], root) != "passed":
        return "slow"
    return "MISSED" if outcome == "passed" else outcome


def main(words: list[str]) -> int:
    """The number of faults that no test found; 1 if the words choose none."""
    chosen = [one for one in MUTATIONS if all(word in one.name for word in words)]
    if not chosen:
        sys.stderr.write(f"no fault has all of these words in its name: {' '.join(words)}\n")
        return 1
    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name in COPIED:
            copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copied(ROOT / name, root / name)
        if run(sorted({one.test for one in chosen}), root) != "passed":
            sys.stderr.write("the tests do not pass without a fault\n")
            return 1
        for mutation in chosen:
            outcome = look_for(mutation, root)
            missed += outcome in ("MISSED", "slow")
            sys.stdout.write(f"{outcome:7} {mutation.name}: {mutation.test}\n")
            sys.stdout.flush()
    return missed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
