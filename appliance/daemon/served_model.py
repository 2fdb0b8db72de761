"""A model that is served, from all sides: its terms, its workers' words, its text, its facts."""

from __future__ import annotations

import msgspec

from appliance.checkpoints.adapters import full_name
from appliance.checkpoints.architectures.task_adapters import served_task
from appliance.checkpoints.checkpoint import CatalogEntry
from appliance.checkpoints.model_config import read_model_config
from appliance.checkpoints.parsers.choose import ChosenParsers
from appliance.checkpoints.task import check_pooler, check_task
from appliance.config.model_parsers import parsers_of
from appliance.config.schema import Model
from appliance.config.schema import SloTable as ConfiguredSlo
from appliance.config.sizing import adapter_places, adapter_room
from appliance.service.front_frames import FrontModel
from appliance.service.interface import ModelFacts, ModelTerms
from appliance.vocabulary import InstanceId, ModelSpec, Slo
from appliance.worker.frames import WorkerModel


class ServedModel(msgspec.Struct, frozen=True):
    """A catalogued model, from all sides."""

    spec: ModelSpec
    worker: WorkerModel
    created: int
    parsers: ChosenParsers = ChosenParsers()
    return_tokens_as_token_ids: bool = False
    architecture: str = ""
    dtype: str = ""
    max_queue: int = 1024
    """Its live requests at most."""
    aliases: tuple[str, ...] = ()
    load: bool = False
    """Whether it is loaded onto a device at the start, or when it is added."""
    parameters: int = 0
    kv_bytes_per_token: int = 0
    state_bytes: int = 0
    multiplied: str = ""
    embedding_task: str = ""
    hidden: frozenset[str] = frozenset()
    """Adapters that clients may not ask for: those that come, and those that leave."""

    @property
    def facts(self) -> ModelFacts:
        room = self.worker.adapter_room
        return ModelFacts(
            architecture=self.architecture,
            dtype=self.dtype,
            multiplied=self.multiplied,
            embedding_task=self.embedding_task,
            parameters=self.parameters,
            weight_bytes=self.spec.weight_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token,
            state_bytes=self.state_bytes,
            max_context_tokens=self.spec.max_context_tokens,
            max_batch=self.spec.max_batch,
            images=self.worker.images,
            sounds=self.worker.sounds,
            adapters=self.adapters,
            max_loras=room.slots if room is not None else len(self.worker.adapters),
            max_lora_rank=room.rank if room is not None else 0,
            tool_parser=self.parsers.tools.name,
            tool_parser_reason=self.parsers.tools.reason,
            reasoning_parser=self.parsers.reasoning.name,
            reasoning_parser_reason=self.parsers.reasoning.reason,
            path=self.worker.path,
        )

    @property
    def tool_parser(self) -> str | None:
        return self.parsers.tools.name or None

    @property
    def reasoning_parser(self) -> str | None:
        return self.parsers.reasoning.name or None

    @property
    def adapters(self) -> tuple[str, ...]:
        """What clients call the model with each of its adapters."""
        return tuple(
            full_name(self.spec.name, one.name)
            for one in self.worker.adapters
            if one.name not in self.hidden
        )

    @property
    def front(self) -> FrontModel:
        return FrontModel(
            name=self.spec.name,
            path=self.worker.path,
            dtype=self.worker.dtype,
            max_context=self.worker.max_context,
            max_batch=self.worker.max_batch,
            task=self.worker.task,
            created=self.created,
            tool_parser=self.tool_parser,
            tool_parser_is_auto=self.parsers.tools.is_auto,
            aliases=self.aliases,
            reasoning_parser=self.reasoning_parser,
            max_logprobs=self.worker.max_logprobs,
            return_tokens_as_token_ids=self.return_tokens_as_token_ids,
            pooler_config=self.worker.pooler_config or {},
            embedding_task=self.embedding_task,
            images=self.worker.images,
            sounds=self.worker.sounds,
            adapters=self.adapters,
            takes_adapters=bool(self.worker.adapters or self.worker.adapter_room),
        )


def served_model(
    model: Model, entry: CatalogEntry, instances: frozenset[InstanceId] | None = None
) -> ServedModel:
    """The model as the daemon serves it, on these instances, or on all.

    Raises `CheckpointError` for what it cannot be for, `PoolerRefused` and `TaskRefused`.
    """
    terms = terms_of(model)
    task = check_task(entry.path, model.task)
    asked = model.pooler_config.chosen
    pooled = check_pooler(entry.path, task, asked)
    parsers = parsers_of(model, entry.path, task)
    return ServedModel(
        spec=ModelSpec(
            name=model.name,
            weight_bytes=entry.weight_bytes,
            max_context_tokens=model.max_context,
            max_batch=model.max_batch,
            max_sequences=model.max_sequences,
            slo=terms.slo,
            batch_slo=terms.batch_slo,
            pinned=terms.pinned,
            instances=instances,
        ),
        worker=WorkerModel(
            name=model.name,
            path=model.path,
            dtype=model.dtype,
            max_context=model.max_context,
            max_batch=model.max_batch,
            verify=model.verify,
            task=task,
            reasoning_parser=parsers.reasoning.name,
            max_logprobs=model.max_logprobs,
            pooler_config=asked | ({"task": pooled} if pooled else {}),
            images=model.images,
            sounds=model.sounds,
            adapters=adapter_places(model),
            adapter_room=adapter_room(model),
            speculation=model.speculate.chosen,
            embedding_task=model.embedding_task,
        ),
        created=entry.created,
        parsers=parsers,
        return_tokens_as_token_ids=model.return_tokens_as_token_ids,
        architecture=entry.architecture,
        dtype=entry.dtype,
        max_queue=terms.max_queue,
        aliases=terms.aliases,
        load=model.load,
        parameters=entry.parameters,
        kv_bytes_per_token=entry.kv_bytes_per_token,
        state_bytes=entry.state_bytes,
        multiplied=entry.multiplied,
        embedding_task=served_task(read_model_config(entry.path), model.embedding_task),
    )


def terms_of(model: Model) -> ModelTerms:
    """What can be changed of a model, in the words of the daemon."""
    return ModelTerms(
        slo=_slo(model.slo),
        batch_slo=_slo(model.batch_slo),
        max_queue=model.max_queue,
        pinned=model.pin,
        aliases=model.aliases,
    )


def _slo(slo: ConfiguredSlo) -> Slo:
    return Slo(
        ttft_seconds=float(slo.ttft_seconds),
        tbt_seconds=float(slo.tbt_seconds),
        gap_seconds=float(slo.gap_seconds),
    )
