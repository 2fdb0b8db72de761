"""How a scheduler like vLLM's serves a scenario of one model on one instance, on the lab's profile.

    python -m benchmarks.vllm_schedule SCENARIO RATE [RATE …]

Written after vLLM V1: first come, first served; every step decodes all running requests and takes
prompts, in chunks, within a budget of tokens; where KV blocks run out, the newest running request
gives up all of its blocks and is computed again. No prefix cache. It is what `kv_short.toml` is
compared with: nothing of the daemon's machine is used.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from appliance.lab.experiments import scenario
from appliance.lab.experiments.run import Setting
from appliance.lab.workload import Arrival

STEP_TOKENS: Final = 8192
"""`max_num_batched_tokens`."""
MAX_SEQUENCES: Final = 256
"""`max_num_seqs`."""


@dataclass(slots=True, eq=False)
class ServedRequest:
    """A request: `computed` tokens have KV, in `blocks` blocks."""

    arrival: Arrival
    output_tokens: int
    computed: int = 0
    blocks: int = 0
    times: list[float] = field(default_factory=list)
    """When each token came."""

    @property
    def known(self) -> int:
        """Tokens that are known: the prompt, and those that came."""
        return self.arrival.prompt_tokens + len(self.times)


class VllmSchedule:
    """One model on one instance. A step costs O(running requests)."""

    def __init__(self, setting: Setting) -> None:
        (spec,) = setting.models
        self._profile = setting.profiles[spec.name]
        box = setting.box
        shape = self._profile.kv_shape(box.slab_bytes, box.block_tokens)
        slabs = box.slabs - self._profile.weight_slabs(box.slab_bytes)
        self._free = slabs // shape.group_slabs * shape.group_blocks
        self._block_tokens = shape.block_tokens
        self._until = setting.seconds
        self._waiting: deque[ServedRequest] = deque()
        self._running: list[ServedRequest] = []
        self.preemptions = 0
        self.sequences = [
            ServedRequest(one, min(one.output_tokens, spec.max_context_tokens - one.prompt_tokens))
            for one in setting.arrivals
        ]

    def run(self) -> None:
        """Serve all requests until the setting's end."""
        coming = deque(self.sequences)
        now = 0.0
        while now < self._until:
            while coming and coming[0].arrival.seconds <= now:
                self._waiting.append(coming.popleft())
            if self._running or self._waiting:
                now = self._step(now)
            elif coming:
                now = coming[0].arrival.seconds
            else:
                return

    def _step(self, now: float) -> float:
        """Compute a step; when it is over."""
        work = dict(self._take())
        decoding = [one for one, tokens in work.items() if tokens == 1 and one.times]
        chunks = [(tokens, one.computed) for one, tokens in work.items() if one not in decoding]
        kv_tokens = sum(one.computed for one in decoding)
        if chunks:
            now += self._profile.mixed_step_seconds(len(decoding), kv_tokens, chunks)
        else:
            now += self._profile.step_seconds(len(decoding), kv_tokens)
        for one, tokens in work.items():
            one.computed += tokens
            if one.computed == one.known:
                one.times.append(now)
                if len(one.times) >= one.output_tokens:
                    self._running.remove(one)
                    self._give_back(one)
        return now

    def _take(self) -> Iterator[tuple[ServedRequest, int]]:
        """What the next step computes, and how many tokens of each."""
        budget, preemptions = STEP_TOKENS, self.preemptions
        for one in list(self._running):
            if one not in self._running:
                break  # it had to give up its blocks, and so did all behind it
            tokens = min(one.known - one.computed, budget)
            if not self._grow(one, tokens):
                break
            budget -= tokens
            yield one, tokens
        while self._waiting and budget and len(self._running) < MAX_SEQUENCES:
            one = self._waiting[0]
            tokens = min(one.known - one.computed, budget)
            if preemptions != self.preemptions or self._lacks(one, tokens) > self._free:
                return
            self._running.append(self._waiting.popleft())
            self._grow(one, tokens)
            budget -= tokens
            yield one, tokens

    def _grow(self, one: ServedRequest, tokens: int) -> bool:
        """Have blocks for so many tokens more, if need be those of the newest running request."""
        while (blocks := self._lacks(one, tokens)) > self._free:
            newest = self._running.pop()
            self._give_back(newest)
            newest.computed = 0
            self._waiting.appendleft(newest)
            self.preemptions += 1
            if newest is one:
                return False
        self._free -= blocks
        one.blocks += blocks
        return True

    def _lacks(self, one: ServedRequest, tokens: int) -> int:
        return -(-(one.computed + tokens) // self._block_tokens) - one.blocks

    def _give_back(self, one: ServedRequest) -> None:
        self._free += one.blocks
        one.blocks = 0


def attainment(
    sequences: Sequence[ServedRequest], setting: Setting, warmup_seconds: float
) -> float:
    """The share of tokens in time, as `lab.experiments.metrics` counts."""
    (spec,) = setting.models
    ttft, tbt = spec.slo.ttft_seconds, spec.slo.tbt_seconds
    kept = all_tokens = 0
    for one in sequences:
        due = one.arrival.seconds + ttft
        if one.arrival.seconds < warmup_seconds:
            continue
        times = [time for time in one.times if time <= setting.seconds]
        kept += sum(time <= due + number * tbt + 1e-9 for number, time in enumerate(times))
        passed = max(0, int((setting.seconds - due) / tbt) + 1)
        all_tokens += max(len(times), min(one.output_tokens, passed))
    return kept / all_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenario", type=Path)
    parser.add_argument("rates", nargs="+", metavar="RATE")
    chosen = parser.parse_args()
    for rate in chosen.rates:
        found = scenario.read(chosen.scenario, {"arrivals.rate": rate})
        setting = found.setting(1, chosen.scenario.parent)
        schedule = VllmSchedule(setting)
        schedule.run()
        share = attainment(schedule.sequences, setting, found.warmup_seconds)
        print(f"{rate} requests/s: {share:.3f} in time, {schedule.preemptions} preemptions")


if __name__ == "__main__":
    main()
