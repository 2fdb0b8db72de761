"""What the process must look like before vLLM is imported: environment, CPUs, no network."""

from __future__ import annotations

import os
import sys

from appliance.platform.cpus import read_cpus


def prepare_environment(threads_bind: str, device: str = "cpu") -> None:
    """Set the process up for in-process vLLM engines; call before anything imports torch or vllm.

    `threads_bind` names the CPUs of this worker ("0-3,8"), or is "auto" for all that it may use.
    `device` is "cpu", or "cuda:N" for NVML's GPU N, which is the only one this process sees then.
    Raises `RuntimeError` when torch is imported already, `ValueError` for a list that names no CPU.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already; its threads can no longer be placed")
    cpus = _bind(threads_bind)
    os.environ |= {
        "OMP_NUM_THREADS": str(cpus),
        # Threads that spin between two parallel regions take the CPUs of all others that run here:
        # the other workers, the daemon, a transfer. Steps were 20 to 50 times slower then.
        "OMP_WAIT_POLICY": "PASSIVE",
        # With AMX, vLLM would round activations to 8 bits for weights of 4, which lie in another
        # order then: no test computes that.
        "VLLM_CPU_INT4_W4A8": "0",
        # Models run eagerly. Left on, torch would call a compiler for the first logprobs.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose states the adapter writes
        "VLLM_CONFIGURE_LOGGING": "0",  # its log goes where ours goes
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if device != "cpu":
        os.environ |= {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's
            "CUDA_VISIBLE_DEVICES": device.removeprefix("cuda:"),
            "NCCL_SOCKET_IFNAME": "lo",
            # What reads a peer's memory, or registers what graphs reduce, needs memory that can be
            # exported; torch's is in slabs, which cannot. NCCL copies through its own buffers.
            "NCCL_GRAPH_REGISTER": "0",
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
            "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
            "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
            "VLLM_USE_NCCL_SYMM_MEM": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # torch's draws what the CPU's draws
        }


def move_environment(threads_bind: str) -> None:
    """Have a process on other processors that was forked from one that is prepared, and that has
    imported torch and vLLM but computed nothing. Raises `ValueError` as `prepare_environment`."""
    import torch

    cpus = _bind(threads_bind)
    if os.environ["OMP_NUM_THREADS"] != str(cpus):
        # OpenMP has read the variable already, when it was loaded.
        os.environ["OMP_NUM_THREADS"] = str(cpus)
        torch.set_num_threads(cpus)


def _bind(threads_bind: str) -> int:
    """Bind the process to its processors; returns how many these are."""
    cpus = sorted(os.sched_getaffinity(0)) if threads_bind == "auto" else read_cpus(threads_bind)
    os.sched_setaffinity(0, cpus)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = threads_bind
    return len(cpus)
