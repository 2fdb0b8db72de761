"""The autopilot's process: replays the end of a journal, prints what it recommends, and ends.

`python -m appliance.lab.advice JOURNAL WINDOW_SECONDS CPU_SECONDS HARD_CPU_SECONDS CHOICES` prints
a `ReplayAnswer`. `CHOICES`, a JSON list, are tried before others. It takes the limits of what it
costs on itself before it loads the lab. Nothing else is printed there: what policies print goes to
standard error.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import ApplianceError
from appliance.platform.children import (
    be_last_for_processors,
    die_with_parent,
    forbid_core_dumps,
    forbid_new_privileges,
    go_before_the_daemon,
    name_process,
)
from appliance.service.autopilot import Recommendation, ReplayAnswer
from appliance.service.policy_report import PolicyChoice

if TYPE_CHECKING:
    from appliance.lab.advice.advise import Advice

MEMORY_BYTES = 4 << 30
"""Of its own at most. A journal that needs more ends it."""
OOM_SCORE = 1000
"""Nothing is lost with it."""
LAST_SECONDS = 0.5
"""Of the processor, kept for the answer."""
KEYS = {
    "--cpu-seconds": "policy.autopilot_cpu",
    "--minutes": "policy.autopilot_window",
    "--from": "journal.path",
}


def limit_costs(cpu_seconds: float) -> None:
    """Be the first to go when memory is short, and end with the daemon, or after so much processor
    time."""
    die_with_parent(signal.SIGKILL)
    forbid_new_privileges()
    forbid_core_dumps()
    go_before_the_daemon(OOM_SCORE)
    name_process("autopilot")
    hard = math.ceil(cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


def keep_stdout() -> int:
    """A descriptor of standard output that only the answer is written to: what policies and
    libraries print, also from C, goes to standard error from now on."""
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


def answer(
    journal: Path,
    window_seconds: float,
    cpu_seconds: float,
    hard_cpu_seconds: float,
    also: Sequence[PolicyChoice] = (),
) -> ReplayAnswer:
    """What the replays say. What is wrong with the journal is an answer, too."""
    # Loads the lab, under the limits.
    from appliance.lab.advice.advise import advise
    from appliance.lab.advice.cpu_time import CpuMeter

    left = hard_cpu_seconds - time.process_time() - LAST_SECONDS
    seconds = max(LAST_SECONDS, min(cpu_seconds, left))
    return answer_of(partial(advise, journal, window_seconds / 60, seconds, CpuMeter(), also=also))


def answer_of(advise: Callable[[], Advice]) -> ReplayAnswer:
    """What it says, as the daemon reads it."""
    try:
        found = advise()
    except ApplianceError as error:
        return ReplayAnswer(error=_by_key(str(error)))
    said = found.verdict
    chosen = said.candidate
    return ReplayAnswer(
        found=Recommendation(
            current=found.current,
            chosen=None if chosen is None else chosen.choice,
            name="" if chosen is None else chosen.name,
            gain=_known(said.gain),
            error=_known(said.error),
            reason=_by_key(said.reason),
            observed=_known(found.observed.value),
            requests=found.requests,
            seconds=found.seconds,
            cpu_seconds=found.cpu_seconds,
        )
    )


def _by_key(text: str) -> str:
    """With keys of the configuration where it names options of `appliance policy advise`."""
    for option, key in KEYS.items():
        text = text.replace(option, key)
    return text


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def main(words: list[str], step_back: Callable[[], None] = be_last_for_processors) -> int:
    """Returns the exit status. `step_back` has others go first; tests that wait for an answer do
    without."""
    journal, window_seconds, cpu_seconds, hard_cpu_seconds, choices = words
    own = keep_stdout()
    step_back()
    limit_costs(float(hard_cpu_seconds))
    hard = float(hard_cpu_seconds)
    also = msgspec.json.decode(choices, type=list[PolicyChoice])
    found = answer(Path(journal), float(window_seconds), float(cpu_seconds), hard, also)
    with os.fdopen(own, "wb") as stdout:
        stdout.write(msgspec.json.encode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
