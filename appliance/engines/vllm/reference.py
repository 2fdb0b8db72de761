"""Plain vLLM on a checkpoint, undisturbed: the reference that the appliance's outputs must equal.

It differs from stock vLLM in what `appliance.engines.vllm.layers` mends, and in nothing else.

``python -m appliance.engines.vllm.reference`` reads one `ReferenceTask` as JSON from standard
input, runs it on `vllm.LLM` without any other part of the appliance, and prints the answers as
JSON. It is a process of its own because the adapter changes process-wide settings of vLLM.
"""

from __future__ import annotations

import gc
import os
import sys

import msgspec

from appliance.checkpoints.adapters import MAX_RANK
from appliance.engines.vllm.environment import prepare_environment
from appliance.platform.cpus import deal_cpus, show_cpus


class ReferencePrompt(msgspec.Struct):
    """One prompt, and how many tokens may follow it: `tokens`, or what the model's template makes
    of a `chat` of one user message."""

    tokens: list[int]
    max_tokens: int
    chat: str = ""


class ReferenceAnswer(msgspec.Struct):
    """The tokens of a prompt, and those that follow it."""

    prompt: list[int]
    tokens: list[int]


class ReferenceModel(msgspec.Struct):
    """One model with its prompts; `max_context` in tokens, `tensor_parallel` in processes."""

    path: str
    max_context: int
    prompts: list[ReferencePrompt]
    dtype: str = "float32"
    tensor_parallel: int = 1
    adapter: str = ""
    """The path of the LoRA adapter that all prompts are computed with, if any."""


class ReferenceTask(msgspec.Struct):
    """What to compute, greedily, on the CPU or a GPU (``cuda:N``)."""

    checkpoints: list[ReferenceModel]
    device: str = "cpu"


def main() -> None:
    """Answer the task on standard input: a `ReferenceAnswer` per prompt of each model."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=ReferenceTask)
    prepare_environment("auto", task.device)
    # vLLM and its libraries write to standard output; it is kept for the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    _import_vllm()
    outputs = [_generate(checkpoint, task.device) for checkpoint in task.checkpoints]
    os.write(answer, msgspec.json.encode(outputs))
    # vLLM's threads may outlast its engines; there is nothing left to do for them.
    os._exit(0)


def _import_vllm() -> None:
    """Without looking for garbage, of which there is none: that takes a fifth of the time."""
    gc.disable()
    import vllm.entrypoints.llm  # noqa: F401

    gc.freeze()
    _have_imports_stay_exempt()
    gc.enable()


def _have_imports_stay_exempt() -> None:
    """Have vLLM neither exempt objects from the collection of garbage nor end that they are.

    When it drops a model, it looks at all that was ever imported, twice: a second for a tiny model.
    It exempts what it makes of a model, too, and nothing would collect that when the model goes.
    """
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, _leave)


def _leave() -> None:
    """What is exempt stays so, and nothing else does."""


def _generate(checkpoint: ReferenceModel, device: str) -> list[ReferenceAnswer]:
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.lora.request import LoRARequest

    if checkpoint.tensor_parallel > 1:
        # Left to itself, vLLM wants a NUMA node for each of its processes.
        shares = deal_cpus(sorted(os.sched_getaffinity(0)), checkpoint.tensor_parallel)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(show_cpus, shares))
        # Killed before they end by themselves, they would leave their shared memory behind.
        os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "120"
    llm = LLM(
        checkpoint.path,
        dtype=checkpoint.dtype,
        max_model_len=checkpoint.max_context,
        skip_tokenizer_init=True,
        language_model_only=True,  # prompts are text, whatever else a model may read
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=256 << 20,
        max_num_seqs=8,
        tensor_parallel_size=checkpoint.tensor_parallel,
        **({"enable_lora": True, "max_lora_rank": MAX_RANK} if checkpoint.adapter else {}),
        worker_extension_cls=_extension(),
        # vLLM wants to see so much of a GPU free, whatever it then takes; others may be at work.
        **({} if device == "cpu" else {"gpu_memory_utilization": 0.1}),
    )
    prompts = [prompt.tokens or _rendered(checkpoint, prompt) for prompt in checkpoint.prompts]
    answers = llm.generate(
        [TokensPrompt(prompt_token_ids=tokens) for tokens in prompts],
        [
            SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens, detokenize=False)
            for prompt in checkpoint.prompts
        ],
        use_tqdm=False,
        lora_request=LoRARequest("adapter", 1, checkpoint.adapter) if checkpoint.adapter else None,
    )
    if checkpoint.tensor_parallel > 1:
        # Its processes, and their shared memory, would outlast this one's abrupt end.
        llm.llm_engine.engine_core.shutdown()
    return [
        ReferenceAnswer(prompt, list(answer.outputs[0].token_ids))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _extension() -> str:
    """Imported late, as it imports vLLM."""
    from appliance.engines.vllm.layers.extension import EXTENSION

    return EXTENSION


def _rendered(checkpoint: ReferenceModel, prompt: ReferencePrompt) -> list[int]:
    """A chat's tokens, by the tokenizer that vLLM takes for the checkpoint."""
    from vllm.tokenizers import get_tokenizer

    tokens: list[int] = get_tokenizer(checkpoint.path).apply_chat_template(
        [{"role": "user", "content": prompt.chat}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    return tokens


if __name__ == "__main__":
    main()
