"""A model that is served, from all sides: its terms, its workers' words, its text, its facts."""

from __future__ import annotations

import msgspec

from appliance.service.front_frames import FrontModel
from appliance.service.interface import ModelFacts
from appliance.vocabulary import ModelSpec
from appliance.wire import WorkerModel


class ServedModel(msgspec.Struct, frozen=True):
    """A catalogued model, from all sides."""

    spec: ModelSpec
    worker: WorkerModel
    created: int
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    return_tokens_as_token_ids: bool = False
    architecture: str = ""
    dtype: str = ""
    max_queue: int = 1024
    """Its live requests at most."""
    parameters: int = 0
    kv_bytes_per_token: int = 0

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            architecture=self.architecture,
            dtype=self.dtype,
            parameters=self.parameters,
            weight_bytes=self.spec.weight_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token,
            max_context_tokens=self.spec.max_context_tokens,
            max_batch=self.spec.max_batch,
            path=self.worker.path,
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
            reasoning_parser=self.reasoning_parser,
            max_logprobs=self.worker.max_logprobs,
            return_tokens_as_token_ids=self.return_tokens_as_token_ids,
            pooler_config=self.worker.pooler_config or {},
        )
