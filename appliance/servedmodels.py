"""A model of the configuration as the daemon serves it: its terms, its sizes."""

from __future__ import annotations

from appliance.catalog import CatalogEntry
from appliance.config.schema import Model
from appliance.config.schema import Slo as ConfiguredSlo
from appliance.purpose import check_pooler, check_task
from appliance.served import ServedModel
from appliance.service.interface import ModelTerms
from appliance.vocabulary import ModelSpec, Slo
from appliance.wire import WorkerModel


def served_model(model: Model, entry: CatalogEntry) -> ServedModel:
    """The model as the daemon serves it.

    Raises `CheckpointError` for what it cannot be for, and `PoolerRefused`.
    """
    terms = terms_of(model)
    task = check_task(entry.path, model.task)
    asked = model.pooler_config.chosen
    pooled = check_pooler(entry.path, task, asked)
    return ServedModel(
        spec=ModelSpec(
            name=model.name,
            weight_bytes=entry.weight_bytes,
            max_context_tokens=model.max_context,
            max_batch=model.max_batch,
            slo=terms.slo,
            batch_slo=terms.batch_slo,
            pinned=terms.pinned,
        ),
        worker=WorkerModel(
            name=model.name,
            path=model.path,
            dtype=model.dtype,
            max_context=model.max_context,
            max_batch=model.max_batch,
            verify=model.verify,
            task=task,
            reasoning_parser=model.reasoning_parser,
            max_logprobs=model.max_logprobs,
            pooler_config=asked | ({"task": pooled} if pooled else {}),
        ),
        created=entry.created,
        tool_parser=model.tool_parser or None,
        reasoning_parser=model.reasoning_parser or None,
        return_tokens_as_token_ids=model.return_tokens_as_token_ids,
        architecture=entry.architecture,
        dtype=entry.dtype,
        max_queue=terms.max_queue,
        parameters=entry.parameters,
        kv_bytes_per_token=entry.kv_bytes_per_token,
    )


def terms_of(model: Model) -> ModelTerms:
    """What can be changed of a model, in the words of the daemon."""
    return ModelTerms(
        slo=_promise(model.slo),
        batch_slo=_promise(model.batch_slo),
        max_queue=model.max_queue,
        pinned=model.pin,
    )


def _promise(slo: ConfiguredSlo) -> Slo:
    return Slo(ttft_seconds=float(slo.ttft_seconds), tbt_seconds=float(slo.tbt_seconds))
