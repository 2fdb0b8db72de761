"""Two ranks, one worker: real processes on real vLLM, driven as the daemon drives them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from appliance import framing, vocabulary
from appliance.engines.protocol import SequenceSpec
from appliance.engines.vllm.reference import (
    ReferenceAnswer,
    ReferenceModel,
    ReferencePrompt,
    ReferenceTask,
)
from appliance.memory.host_tier import HostTier
from appliance.platform.cpus import show_cpus
from appliance.vocabulary import (
    BuildModel,
    Direction,
    EvictModel,
    KvMove,
    KvMoved,
    KvShape,
    LoadModel,
    ModelBuilt,
    ModelFailed,
    ModelLoaded,
    MoveKv,
    PrefillDeferred,
    PrefillDone,
    Release,
    RunPrefill,
    RunTurn,
    StoreWeights,
    TrimKv,
    TurnEnd,
    TurnEnded,
    WeightsStored,
)
from appliance.worker import frames
from tests.engine.house import Sampling, body
from tests.patience import PATIENCE_SECONDS

SLAB = 256 * 1024
POOL_SLABS = 24
MODELS = ["llama-mha", "qwen2-gqa", "qwen3-128"]
GENERATE, TASKS = vocabulary.Task.GENERATE, {"vectors": vocabulary.Task.EMBED}
LENGTH = 24
GREEDY = Sampling(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
KV_SLABS = 12

M = TypeVar("M")


def prompts(model: str) -> list[tuple[int, ...]]:
    """Three prompts: shorter than a block, ending on one, and over several."""
    start = 3 + sum(model.encode()) % 50
    return [tuple(start + i * 7 % 400 for i in range(n)) for n in (5, 64, 90)]


class Box:
    """A worker process with followers, and the host tier of its box."""

    def __init__(self, checkpoints: dict[str, str], scratch: Path, cpus: list[int]) -> None:
        self.host = HostTier.create(128 << 20)
        self.outputs: dict[str, list[int]] = {}
        self.details: list[bytes] = []
        self.kv: dict[str, KvShape] = {}
        self.built: dict[str, ModelBuilt] = {}
        self.high_water = 0
        self._next_place = 0
        self._turns = 0
        self._reports: list[frames.Up] = []
        self._decoder = frames.decoder_of_reports()
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(PATIENCE_SECONDS)
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "appliance.worker",
                    str(theirs.fileno()),
                    str(self.host.fd),
                ],
                pass_fds=(theirs.fileno(), self.host.fd),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": str(scratch)},
            )
        self.send(
            frames.Configure(
                version=frames.PROTOCOL_VERSION,
                instance=0,
                cpus=show_cpus(cpus),
                slabs=POOL_SLABS,
                slab_bytes=SLAB,
                host_bytes=self.host.nbytes,
                models=[
                    frames.WorkerModel(
                        name, path, "float32", 1024, 8, task=TASKS.get(name, GENERATE)
                    )
                    for name, path in checkpoints.items()
                ],
                ranks=2,
            )
        )
        self.until(frames.Hello)

    def send(self, message: frames.Down) -> None:
        self._connection.sendall(framing.encode(message))

    def until(self, *kinds: type[M]) -> M:
        """The next report of these kinds; tokens on the way are kept."""
        while True:
            while self._reports:
                report = self._reports.pop(0)
                if isinstance(report, frames.Tokens):
                    for one in report.produced:
                        if one.detail is not None:
                            self.details.append(one.detail)
                        self.outputs.setdefault(one.request, []).append(one.token)
                if isinstance(report, frames.PoolReport):
                    self.high_water = report.high_water_slabs
                if isinstance(report, kinds):
                    return report
            data = self._connection.recv(1 << 16)
            if not data:
                raise EOFError(f"the worker ended with {self.process.wait(PATIENCE_SECONDS)}")
            self._reports += self._decoder.feed(data)

    def places(self, count: int, nbytes: int) -> tuple[int, ...]:
        """New places in the host tier, in descending order, so that none continues another."""
        first = self._next_place
        self._next_place += count * nbytes
        return tuple(reversed(range(first, self._next_place, nbytes)))

    def build(self, model: str) -> None:
        self.send(BuildModel(instance=0, model=model))
        built = self.until(ModelBuilt)
        self.kv[model] = built.kv
        self.built[model] = built
        offsets = self.places(built.host_slabs, SLAB)
        self.send(StoreWeights(instance=0, model=model, host_offsets=offsets, fill=True))
        self.until(WeightsStored)

    def load(self, model: str) -> int:
        self.send(LoadModel(instance=0, model=model))
        return self.until(ModelLoaded).moved_bytes

    def evict(self, model: str) -> None:
        self.send(EvictModel(instance=0, model=model))

    def add(
        self, model: str, request: str, prompt: tuple[int, ...], sampling: Sampling = GREEDY
    ) -> None:
        sequence = SequenceSpec(request=request, model=model, prompt=prompt, body=body(sampling))
        self.send(frames.AddSequence(sequence))

    def prefill(self, model: str, request: str, kv_slabs: int = KV_SLABS) -> Any:
        self.send(RunPrefill(instance=0, model=model, request=request, kv_slabs=kv_slabs))
        return self.until(PrefillDone, PrefillDeferred)

    def begin_turn(self, model: str, requests: list[str], quota_seconds: float) -> None:
        self._turns += 1
        self.send(
            RunTurn(
                instance=0,
                model=model,
                turn=self._turns,
                requests=tuple(requests),
                quota_seconds=quota_seconds,
                kv_slabs=KV_SLABS,
            )
        )

    def mixed_turn(
        self, model: str, requests: list[str], prompts: list[str], kv_slabs: int = KV_SLABS
    ) -> TurnEnded:
        """Until the prompts are over, in chunks of 16 tokens."""
        self._turns += 1
        self.send(
            RunTurn(
                instance=0,
                model=model,
                turn=self._turns,
                requests=tuple(requests),
                quota_seconds=0.0,
                kv_slabs=kv_slabs,
                prompts=tuple(prompts),
                chunk_tokens=16,
            )
        )
        return self.until(TurnEnded)

    def turn(self, model: str, requests: list[str], quota_seconds: float = 600) -> TurnEnded:
        self.begin_turn(model, requests, quota_seconds)
        return self.until(TurnEnded)

    def move(self, model: str, direction: Direction, places: dict[str, tuple[int, ...]]) -> KvMoved:
        """Outwards until nothing of the model's KV is left, cold or not."""
        moves = tuple(KvMove(request=r, host_offsets=offsets) for r, offsets in places.items())
        slabs = KV_SLABS if direction is Direction.IN else 0
        self.send(MoveKv(instance=0, model=model, direction=direction, moves=moves, kv_slabs=slabs))
        return self.until(KvMoved)

    def children(self) -> dict[int, str]:
        """Processes of the worker, with their command lines."""
        pid = self.process.pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(child): Path(f"/proc/{child}/cmdline").read_text() for child in found}

    def follower(self) -> int:
        (pid,) = (
            pid for pid, line in self.children().items() if "appliance.worker.follower" in line
        )
        return pid

    def close(self) -> None:
        self._connection.close()  # the worker ends by this
        self.process.wait(PATIENCE_SECONDS)
        self.host.close()


@pytest.fixture(scope="module")
def made(
    checkpoints: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], Box]]:
    """Makes boxes with at most so many processors, which end with the module."""
    boxes: list[Box] = []
    wanted = {name: checkpoints[name] for name in MODELS}
    wanted["vectors"] = checkpoints["qwen2-gqa"]
    wanted["broken"] = str(tmp_path_factory.mktemp("empty"))

    def make(processors: int) -> Box:
        cpus = sorted(os.sched_getaffinity(0))[:processors]
        boxes.append(Box(wanted, tmp_path_factory.mktemp("scratch"), cpus))
        return boxes[-1]

    yield make
    for box in boxes:
        box.close()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(2, id="apart"),
        pytest.param(1, id="crowded", marks=pytest.mark.thorough),
    ],
)
def box(request: pytest.FixtureRequest, made: Callable[[int], Box]) -> Box:
    """Three models on two ranks, each with a processor of its own, or both on one."""
    box = made(request.param)
    for model in MODELS:
        box.build(model)
    return box


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, str]) -> dict[str, list[list[int]]]:
    """The greedy tokens of plain vLLM, on two processes, too."""
    task = ReferenceTask(
        [
            ReferenceModel(
                checkpoints[model],
                1024,
                [ReferencePrompt(list(prompt), LENGTH) for prompt in prompts(model)],
                tensor_parallel=2,
            )
            for model in MODELS
        ]
    )
    done = subprocess.run(
        [sys.executable, "-m", "appliance.engines.vllm.reference"],
        input=msgspec.json.encode(task),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:]
    outputs = msgspec.json.decode(done.stdout, type=list[list[ReferenceAnswer]])
    tokens = [[answer.tokens for answer in answers] for answers in outputs]
    return dict(zip(MODELS, tokens, strict=True))


def test_three_models_in_turn_equal_plain_vllm(
    box: Box, expected: dict[str, list[list[int]]]
) -> None:
    """Weights reloaded and KV swapped between turns of one step or of some change no token."""
    live: dict[str, dict[str, tuple[int, ...]]] = {}
    for model in MODELS:
        live[model] = {}
        for number, prompt in enumerate(prompts(model)):
            name = f"{model}/{number}"
            shape = box.kv[model]
            live[model][name] = box.places(shape.blocks(len(prompt) + LENGTH), shape.block_bytes)
            box.add(model, name, prompt)
    turns = 0
    while any(live.values()):
        for model in MODELS:
            if not (places := live[model]):
                continue
            box.load(model)
            if turns < len(MODELS):
                for name in places:
                    assert isinstance(box.prefill(model, name), PrefillDone)
            else:
                assert box.move(model, Direction.IN, places).moved == tuple(places)
            turns += 1
            ended = box.turn(model, list(places), quota_seconds=0.02 * (turns % 2))
            if ended.reason is TurnEnd.DRAINED:
                live[model] = {}
            else:
                moved = box.move(model, Direction.OUT, places)
                assert (moved.moved, moved.missing, moved.kv_slabs) == (tuple(places), (), 0)
            box.evict(model)

    assert turns > 2 * len(MODELS), "there was nothing to swap"
    for model in MODELS:
        names = [f"{model}/{number}" for number in range(3)]
        assert [box.outputs.pop(name) for name in names] == expected[model]
        assert all(len(output) == LENGTH for output in expected[model])


def test_ranks_share_the_memory(box: Box) -> None:
    """Each rank has its part of weights and KV; the three models would not fit its pool."""
    built = box.built
    whole = {"llama-mha": 3 * 4 * 32, "qwen2-gqa": 4 * 2 * 32, "qwen3-128": 2 * 2 * 128}
    for model in MODELS:
        assert built[model].host_slabs == 2 * built[model].weight_slabs
        # Layers, heads (one more where there is one for two ranks), elements of a key and a value.
        assert built[model].kv.block_bytes == whole[model] * 32 * 2 * 4
    longest = sum(box.kv[model].slabs(box.kv[model].blocks(1024)) for model in MODELS)
    assert sum(one.weight_slabs for one in built.values()) + longest > POOL_SLABS
    assert 0 < box.high_water <= POOL_SLABS


def test_ranks_draw_alike(box: Box) -> None:
    """Chance is the same on all ranks: one that drew another token would end the instance."""
    model = MODELS[1]
    box.load(model)
    requests = {}
    for number, seed in enumerate((None, None, 5, 5)):
        requests[f"random/{number}"] = seed
        sampling = Sampling(max_tokens=40, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True)
        box.add(model, f"random/{number}", prompts(model)[1], sampling)
        box.prefill(model, f"random/{number}")

    box.turn(model, list(requests))
    # What was drawn is compared before the next step.
    box.add(model, "after", prompts(model)[0], Sampling(max_tokens=2, temperature=1.0))
    box.prefill(model, "after")
    box.turn(model, ["after"])
    box.evict(model)

    outputs = [box.outputs.pop(name) for name in requests]
    assert outputs[2] == outputs[3]
    assert len({tuple(output) for output in outputs}) == 3
    assert all(len(output) == 40 for output in outputs)


def test_a_full_pool_is_an_answer(box: Box) -> None:
    """All ranks refuse the same prefill, and carry on with the next."""
    model = MODELS[0]
    box.load(model)
    box.add(model, "full", prompts(model)[0])
    # Cold cache of the tests before would do, else.
    box.send(TrimKv(instance=0, model=model, kv_slabs=0))

    assert isinstance(box.prefill(model, "full", kv_slabs=0), PrefillDeferred)
    assert isinstance(box.prefill(model, "full"), PrefillDone)
    box.turn(model, ["full"])
    box.evict(model)

    assert len(box.outputs.pop("full")) == LENGTH


def test_ranks_compute_prompts_in_a_turn(box: Box, expected: dict[str, list[list[int]]]) -> None:
    """Steps and prompts of a mixed turn are the same on all ranks; so is that one does not fit."""
    model = MODELS[0]
    box.load(model)
    box.send(TrimKv(instance=0, model=model, kv_slabs=0))
    names = [f"mixed/{number}" for number in range(3)]
    for name, prompt in zip(names, prompts(model), strict=True):
        box.add(model, name, prompt)
    box.prefill(model, names[0])
    shape = box.kv[model]
    assert shape.blocks(900) > shape.group_blocks
    box.add(model, "mixed/long", tuple(5 + i % 400 for i in range(900)))
    full = box.mixed_turn(model, names[:1], ["mixed/long"], shape.group_slabs)
    box.send(Release(instance=0, model=model, request="mixed/long"))
    outputs = dict(box.outputs)

    ended = box.mixed_turn(model, names[:1], names[1:])

    begun = [name for name in outputs if name.startswith("mixed/")]
    assert (full.steps, begun) == (1, names[:1])
    # The second prompt begins with the first, whose two blocks are in the cache by then.
    assert ended.steps == -(-64 // 16) + -(-(90 - 64) // 16)
    box.turn(model, names)
    box.evict(model)
    assert [box.outputs.pop(name) for name in names] == expected[model]


def test_a_model_that_cannot_be_built(box: Box) -> None:
    """It is reported, and the others are served by both ranks as before."""
    box.send(BuildModel(instance=0, model="broken"))
    assert box.until(ModelFailed).model == "broken"

    model = MODELS[2]
    moved_bytes = box.load(model)
    box.add(model, "next", prompts(model)[0])
    box.prefill(model, "next")
    box.turn(model, ["next"])
    box.evict(model)

    assert len(box.outputs.pop("next")) == LENGTH
    built = box.built[model]
    assert built.host_slabs - 2 < moved_bytes / SLAB <= built.host_slabs


@pytest.mark.parametrize("killed", ["follower", "leader"])
@pytest.mark.parametrize("processors", [2, 1], ids=["apart", "crowded"])
def test_a_killed_rank_ends_the_instance(
    made: Callable[[int], Box], killed: str, processors: int
) -> None:
    """In mid-turn, from whatever it waits in; no process and no shared memory stays behind."""
    box = made(processors)
    model = MODELS[0]
    box.build(model)
    box.load(model)
    endless = Sampling(max_tokens=1000, temperature=0.0, ignore_eos=True)
    box.add(model, "long", (5, 6, 7), endless)
    box.prefill(model, "long")
    follower = box.follower()
    assert _nameless(box.process.pid)
    assert _nameless(follower)
    pidfds = [os.pidfd_open(pid) for pid in box.children()]
    box.begin_turn(model, ["long"], 600)
    while len(box.outputs["long"]) < 20:
        box.until(frames.Tokens)

    os.kill(follower if killed == "follower" else box.process.pid, signal.SIGKILL)

    with pytest.raises(EOFError, match=r"ended with (1|-9)"):
        box.until(TurnEnded)
    for pidfd in pidfds:
        assert _ended(pidfd), "a process outlives the instance"
        os.close(pidfd)


def _nameless(pid: int) -> bool:
    """Whether a process shares memory, and none of it has a name, which would outlive it."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    shared = [line for line in lines if "/dev/shm/" in line]
    return bool(shared) and all(line.endswith(" (deleted)") for line in shared)


def _ended(pidfd: int) -> bool:
    """Wait for the end of a process that is not a child."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(PATIENCE_SECONDS * 1000))


def test_vectors_of_two_ranks(made: Callable[[int], Box], checkpoints: dict[str, str]) -> None:
    """A prompt is pooled to one vector: the model's own last hidden state, at length 1."""
    import torch
    import transformers
    from vllm import PoolingParams

    from appliance.engines.vllm.messages import decode_output, encode_params

    box = made(2)
    box.build("vectors")
    box.load("vectors")
    plain = transformers.AutoModel.from_pretrained(
        checkpoints["qwen2-gqa"], dtype=torch.float32, attn_implementation="eager"
    )
    for number, prompt in enumerate(prompts("vectors")):
        sequence = SequenceSpec(
            request=f"v{number}",
            model="vectors",
            prompt=prompt,
            body=encode_params(PoolingParams(task="embed")),
        )
        box.send(frames.AddSequence(sequence))
        assert isinstance(box.prefill("vectors", f"v{number}"), PrefillDone)
        with torch.inference_mode():
            state = plain(torch.tensor([prompt])).last_hidden_state[0, -1]
        found = decode_output(box.details[-1]).pooling_output.reshape(-1)
        torch.testing.assert_close(found, state / state.norm(), rtol=1e-3, atol=1e-4)
    box.evict("vectors")
