"""A daemon's configuration as a scenario: its models, sizes and targets, with a load that is given.

The models are on GPUs of the table, with times from data sheets, unless they were measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.checkpoints.model_config import ModelConfig, read_model_config
from appliance.checkpoints.safetensors import read_header, weight_files
from appliance.checkpoints.task import read_task
from appliance.config.loader import load_config
from appliance.config.schema import Model, SloTable
from appliance.config.sizing import read_model
from appliance.errors import ConfigError, LabError
from appliance.vocabulary import Task

GPU: Final = "A100"
"""Until another kind is asked for."""
RATE: Final = 0.1
"""Requests a second of each model, unless `--set arrivals.rate` says otherwise."""
DURATION, WARMUP = "90s", "15s"
_EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")
_CHOSEN: Final = ("num_experts_per_tok", "experts_per_token", "moe_topk")


def is_daemon_config(document: Mapping[str, Any]) -> bool:
    """Whether a file is a daemon's, and not a scenario."""
    return "model" in document and "models" not in document and "hardware" not in document


def scenario_of(path: Path) -> dict[str, Any]:
    """The scenario of a daemon's configuration, as its file would have it: the models that generate
    text, chats at `RATE`. Raises `LabError` with the first problem of the configuration."""
    try:
        config = load_config(path)
    except ConfigError as error:
        raise LabError(str(error.problems[0])) from None
    generating = [
        model for model in config.models if read_task(Path(model.path), model.task) is Task.GENERATE
    ]
    if not generating:
        raise LabError(f"{path}: no model generates text, and the lab models no other")
    return {
        "title": path.name,
        "duration": DURATION,
        "warmup": WARMUP,
        "hardware": {
            "gpu": GPU,
            "count": config.devices.instances,
            "host_cache": int(config.devices.host_cache_bytes),
            "data_sheet": True,
        },
        "slo": _slo(generating[0].slo),
        "models": [_group(model) for model in generating],
        "sizes": [_sizes(read_model(model, config.devices)) for model in generating],
        "arrivals": {"rate": RATE, "lengths": str(files("appliance.lab") / "chats.csv")},
    }


def _slo(slo: SloTable) -> dict[str, str]:
    return {
        "ttft": f"{slo.ttft_seconds:g}s",
        "tbt": f"{slo.tbt_seconds:g}s",
        "gap": f"{slo.gap_seconds:g}s",
    }


def _group(model: Model) -> dict[str, Any]:
    return {
        "names": [model.name],
        "mix": [model.name],
        "context": model.max_context,
        "max_batch": model.max_batch,
        "slo": _slo(model.slo),
        "pinned": model.pin,
    }


def _sizes(entry: CatalogEntry) -> dict[str, Any]:
    config = read_model_config(entry.path)
    return {
        "name": entry.name,
        "weight_bytes": entry.weight_bytes,
        "active_parameters": _active(entry, config),
        "layers": entry.layers,
        "hidden": config.integer("hidden_size"),
        "kv_bytes_per_token": max(1, entry.kv_bytes_per_token),
    }


def _active(entry: CatalogEntry, config: ModelConfig) -> int:
    """Parameters that a token is computed with: of experts, the share that is chosen."""
    experts, chosen = config.first(*_EXPERTS), config.first(*_CHOSEN)
    if not isinstance(experts, int) or not isinstance(chosen, int) or not 0 < chosen < experts:
        return entry.parameters
    tensors = [tensor for file in weight_files(entry.path) for tensor in read_header(file).tensors]
    in_experts = sum([math.prod(one.shape) for one in tensors if ".experts." in one.name])
    whole = sum([math.prod(one.shape) for one in tensors]) or 1
    return int(entry.parameters * (1 - in_experts / whole * (1 - chosen / experts)))
