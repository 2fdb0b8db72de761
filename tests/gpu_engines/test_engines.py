"""Engines of vLLM's CUDA build on our memory: what an expert's reading found, and more."""

from __future__ import annotations

import pytest

from appliance.engines.protocol import Verdict
from tests.gpu_engines.conftest import COMPUTES, Engine, Worker


def test_graphs_are_captured_while_the_host_tier_is_page_locked(
    worker: Worker, dense: Engine, other: Engine
) -> None:
    """A call of the pinning thread spoiled the graph, and was refused: both gave up."""
    (pinning,) = worker.arena.vmm._pinnings  # type: ignore[attr-defined]
    pinning.wait()

    assert pinning.pinned_bytes == worker.host.nbytes
    for engine in (dense, other):
        assert engine.raw._runner.model.concrete_cudagraph_entries


def test_tokens_survive_turns(dense: Engine, other: Engine) -> None:
    """Weights unmapped, KV in the host tier, another model in between: the same tokens."""
    dense.load()
    expected = dense.answer("plain", 12)
    dense.add("r")
    made = [dense.prefill("r"), *dense.steps("r", 2)]
    places = dense.worker.places(dense.raw.kv.blocks(512), dense.raw.kv.block_bytes)
    for _ in range(3):
        dense.raw.swap_out("r", places)
        dense.go()
        other.load()
        other.answer("o", 3)
        other.go()
        dense.raw.begin_load()
        dense.raw.swap_in("r", places, 1 << 20)
        made += dense.steps("r", 3)
    dense.forget("r")
    dense.go()

    assert made == expected or not COMPUTES
    assert len(set(expected)) > 1 or not COMPUTES


@pytest.mark.parametrize("sampling", [{}, {"top_k": 20}, {"top_p": 0.9}], ids=str)
def test_a_seeded_request_resumes(dense: Engine, sampling: dict[str, float]) -> None:
    """Its generator is the device's: one of the CPU ended the worker. Started anew with what it
    has said, the request goes on as it would have."""
    dense.load()
    asked = {"temperature": 1.0, "seed": 7, **sampling}
    whole = dense.answer("s", 8, **asked)
    again = dense.answer("s", 8, **asked)
    another = dense.answer("s", 8, **(asked | {"seed": 8}))
    dense.add("s", output=tuple(whole[:4]), **asked)
    resumed = [dense.prefill("s"), *dense.steps("s", 3)]
    dense.forget("s")
    dense.go()

    assert whole == again or not COMPUTES
    assert resumed == whole[4:] or not COMPUTES
    assert another != whole or not COMPUTES


def test_requests_with_and_without_seeds_share_a_step(dense: Engine) -> None:
    dense.load()
    alone = dense.answer("s", 6, temperature=1.0, seed=7)
    dense.add("s", temperature=1.0, seed=7)
    dense.add("g")
    dense.add("t", temperature=1.0)
    made = [dense.prefill("s")]
    dense.prefill("g")
    dense.prefill("t")
    for _ in range(5):
        by_name = {one.request: one.token for one in dense.raw.step(["s", "g", "t"], 1 << 20)}
        made.append(by_name["s"])
    for name in ("s", "g", "t"):
        dense.forget(name)
    dense.go()

    assert made == alone or not COMPUTES


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"logprobs": 3},
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 3, "stop_token_ids": [9]},
    ],
    ids=str,
)
def test_ways_to_sample(dense: Engine, sampling: dict[str, object]) -> None:
    dense.load()

    made = dense.answer("w", 4, **sampling)

    dense.go()
    assert len(made) == 4
    assert all(0 <= token < 2048 for token in made) or not COMPUTES


def test_a_step_that_fails_half_way_leaves_nothing_running(dense: Engine) -> None:
    """Its blocks were unmapped while the device still wrote to them."""
    dense.load()
    expected = dense.answer("r", 4, 200)
    layer = dense.raw._runner.get_model().model.layers[2]

    def fail(*arguments: object) -> None:
        raise MemoryError("activations do not fit")

    hook = layer.register_forward_pre_hook(fail)
    dense.add("x", 200)
    with pytest.raises(MemoryError, match="activations do not fit"):
        dense.prefill("x")
    hook.remove()
    dense.go()
    dense.raw.forget("x")
    dense.load()
    dense.add("y", 200)
    dense.raw.begin_prefill("y", 1 << 20)
    dense.forget("y")  # while its blocks are being emptied
    dense.raw.trim(0)
    after = dense.answer("r", 4, 200)
    dense.go()

    assert after == expected or not COMPUTES


def test_a_prompt_shares_steps_with_requests_that_decode(dense: Engine) -> None:
    dense.load()
    expected = {"a": dense.answer("a", 5, 40), "b": dense.answer("b", 1, 300)}
    dense.add("a", 40)
    made = {"a": [dense.prefill("a")], "b": []}
    dense.add("b", 300)
    dense.raw.begin_prefill("b", 1 << 20)
    for _ in range(4):
        prompts = ("b",) if not made["b"] else ()
        for one in dense.raw.step(["a"], 1 << 20, prompts, 128):
            made[one.request].append(one.token)
    for name in ("a", "b"):
        dense.forget(name)
    dense.go()

    assert len(made["b"]) == 1
    assert made == expected or not COMPUTES


def test_weights_arrive_as_they_are(dense: Engine) -> None:
    dense.load()

    verdict = dense.raw.verify()

    dense.go()
    assert verdict is Verdict.OK or not COMPUTES


def test_experts_share_a_process_with_others(worker: Worker, dense: Engine) -> None:
    """vLLM's workspace was as large as the captured steps only, and the next engine's took the
    place of the one before."""
    moe = worker.engine("moe")
    moe.load()
    expected = moe.answer("m", 4, 300)
    moe.go()
    later = worker.engine("dense-b")
    later.load()
    later.answer("l", 3)
    later.go()
    moe.load()
    after = moe.answer("m", 4, 300)
    moe.go()
    later.raw.retire()

    assert after == expected or not COMPUTES


def test_engines_that_come_and_go_leave_nothing(worker: Worker, dense: Engine) -> None:
    """The null block was counted for each, and given back for none; nor was what vLLM had made."""
    runtime = dense.raw._device.runtime
    used, mapped = [], []
    for _ in range(4):
        engine = worker.engine("dense-b")
        engine.load()
        engine.answer("c", 3 if COMPUTES else 1)
        engine.go()
        engine.raw.retire()
        del engine
        used.append(runtime.used)
        mapped.append(sum(worker.arena.usage().values()) - worker.arena.free)

    assert used[1:] == used[1:2] * 3
    assert mapped[1:] == mapped[1:2] * 3
    worker.arena.check_integrity()


def test_a_build_that_fails_leaves_nothing(
    worker: Worker, dense: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was counted for its null block stayed counted."""
    from appliance.engines.vllm import engine

    def fail(*arguments: object) -> None:
        raise RuntimeError("after all of vLLM is there")

    monkeypatch.setattr(engine, "Gates", fail)
    runtime = dense.raw._device.runtime
    used = []
    for _ in range(3):
        with pytest.raises(RuntimeError, match="after all of vLLM"):
            worker.engine("dense-b")
        used.append(runtime.used)

    assert used[1:] == used[1:2] * 2
    worker.arena.check_integrity()
