"""`VllmEngine`: one vLLM engine core in this process, on memory that comes and goes.

A request is known in two places: vLLM's scheduler (`Request`: tokens, blocks) and its model
runner (`CachedRequestState`: the same, as the computation sees them). Both are made by `add` and
removed by `forget`, and in between a request is in one of four states:

    added     no blocks, nothing computed      -> `prefill`, `begin_prefill`, or `swap_in`
    begun     blocks of a prompt               -> `step`, as a prompt
    resident  blocks for all computed tokens   -> `step`, `swap_out`
    swapped   no blocks, tokens computed       -> `swap_in`

All tokens but the last are computed once a request has produced one.

Full blocks are cached by the hash of their tokens and all before them, while they are in use and,
cold, afterwards. `prefill` computes, and `swap_in` copies, only what is not found there. A step
that fails leaves its requests added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import cached_get_tokenizer
from vllm.transformers_utils.config import (
    get_pooling_config,
    get_sentence_transformer_tokenizer_config,
    try_get_dense_modules,
)
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from appliance.checkpoints.adapters import AdapterPlace, AdapterRoom
from appliance.checkpoints.architectures.transcribers import encoder_tokens
from appliance.checkpoints.draft_heads import head_files
from appliance.checkpoints.drafts import Speculation
from appliance.checkpoints.families import keeps_state
from appliance.checkpoints.kv_layers import is_compressed
from appliance.checkpoints.language_models import MEDIA, image_token_bytes, language_tensors
from appliance.checkpoints.model_config import ModelConfig, read_model_config
from appliance.checkpoints.safetensors import WeightFile, read_header, weight_files
from appliance.checkpoints.task import PoolerValue, dense_files
from appliance.checkpoints.windows import STEP_TOKENS
from appliance.engines.protocol import (
    NO_TOKEN,
    DraftUse,
    KvBytes,
    KvUse,
    Produced,
    SequenceSpec,
    Verdict,
)
from appliance.engines.vllm.configs.types import register_types
from appliance.engines.vllm.device import Device, HostDevice, attention
from appliance.engines.vllm.drafts.ngram import Drafts, draft_args
from appliance.engines.vllm.executor import RankExecutor, ensure_expert_group
from appliance.engines.vllm.gates import Gates
from appliance.engines.vllm.guides import Guides, took_too_long
from appliance.engines.vllm.images.arguments import image_args
from appliance.engines.vllm.images.prompts import ImagePrompts
from appliance.engines.vllm.kv.cache import KvCache
from appliance.engines.vllm.kv.placement import KvPlacement, placing
from appliance.engines.vllm.lora.requests import AdapterTable, BaseAdapters, lora_arguments
from appliance.engines.vllm.messages import decode_request, encode_output
from appliance.engines.vllm.pooling import (
    check_pooling,
    complete_pooling,
    engine_args,
    pool_in_chunks,
)
from appliance.engines.vllm.reasoning import ThinkingBudgets, parser_of
from appliance.engines.vllm.runner_states import RunnerStates
from appliance.engines.vllm.sampling import check_sampling
from appliance.engines.vllm.scheduler import ParkedScheduler
from appliance.engines.vllm.seams import check_seams
from appliance.engines.vllm.sound.arguments import sound_args
from appliance.engines.vllm.sound.prompts import SoundPrompts
from appliance.engines.vllm.weights import parameters
from appliance.engines.vllm.weights.placed import PlacedWeights
from appliance.engines.vllm.weights.quantized import name_as_text
from appliance.engines.vllm.weights.recipe import LOAD_FORMAT, recording
from appliance.memory.arena import Arena
from appliance.memory.host_tier import HostTier
from appliance.memory.kv_pool import BLOCK_TOKENS
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer
from appliance.memory.weight_cache.images import ImageFolder
from appliance.vocabulary import FinishReason, KvShape, ModelName, RequestId, Task

BATCHED_TOKENS: Final = STEP_TOKENS
SCORED_TOKENS: Final = 256
"""Of prompts in a step where one wants log probabilities of its prompt: they take memory for so
many times the vocabulary."""

_FINISH: Final = {
    VllmFinishReason.STOP: FinishReason.STOP,
    VllmFinishReason.LENGTH: FinishReason.LENGTH,
    VllmFinishReason.ABORT: FinishReason.CANCELLED,
    VllmFinishReason.ERROR: FinishReason.ERROR,
    VllmFinishReason.REPETITION: FinishReason.STOP,
}


class VllmEngine:
    """Implements `appliance.engines.protocol.Engine`.

    Engines of one process share vLLM's process-global state, so none is ever shut down by itself:
    that ends with their worker. An engine may be retired before.
    """

    def __init__(
        self,
        model: ModelName,
        core: EngineCore,
        placement: KvPlacement,
        host: HostTier,
        swapper: Swapper,
        task: Task,
        reasoning_parser: str,
        adapters: BaseAdapters,
    ) -> None:
        """Use `build`."""
        self.model = model
        self._task = task
        self._core = core
        self._scheduler: ParkedScheduler = core.scheduler
        self._runner: GPUModelRunner = core.model_executor.driver_worker.worker.model_runner
        self._device = placement.device
        config = core.vllm_config.model_config
        self._vocabulary: int = config.get_vocab_size()
        self._states = RunnerStates(
            self._runner, self._vocabulary, len(placement.tables), self._device
        )
        self._adapters = AdapterTable(model, adapters, self._runner)
        self._cache = KvCache(model, placement, self._scheduler, self._states, host, swapper)
        snapshots = self._scheduler.snapshots
        self._hasher = core.request_block_hasher if snapshots is None else snapshots.hasher
        self.kv = self._cache.shape
        self._images = _read_by(task, core, self._runner, self.kv)
        self._placed = placement.placed
        self._drafts = Drafts(core, self._runner, self.kv.step_tokens, self._placed.weights)
        self._whole_prompts = config.attn_type in ("encoder_only", "encoder_decoder")
        """Whether a prompt is computed in one step: its tokens attend in both directions, or to
        what an encoder makes in that step."""
        weights, model_of_vllm = self._placed.weights, self._runner.get_model()
        pool_in_chunks(task, config, model_of_vllm)
        parameters.check_moved(model_of_vllm, weights, self._placed.packings, self._cache.addresses)
        self._gates = Gates(model_of_vllm, weights, self._device)
        self.weight_slabs = weights.region.slots
        self.host_slabs = weights.host_slabs
        self.layout_digest = weights.layout.digest
        self._stepping: Sequence[RequestId] | None = None
        """The list that `_batch` holds the requests of, while nothing else moved them."""
        self._batch: list[Request] = []
        manager = core.structured_output_manager
        manager.reasoner_cls = parser_of(reasoning_parser)
        self._guides = Guides(core.vllm_config, manager)
        self._budgets = ThinkingBudgets(
            reasoning_parser, core.vllm_config, self._runner.input_batch
        )

    @classmethod
    def build(
        cls,
        model: ModelName,
        path: str,
        *,
        dtype: str,
        max_context: int,
        max_batch: int,
        arena: Arena,
        host: HostTier,
        swapper: Swapper,
        verify: bool = False,
        ranks: int = 1,
        device: Device | None = None,
        images: ImageFolder | None = None,
        task: Task = Task.GENERATE,
        reasoning_parser: str = "",
        max_logprobs: int = 20,
        pooler_config: Mapping[str, PoolerValue] | None = None,
        prompt_images: int = 0,
        prompt_sounds: int = 0,
        adapters: Sequence[AdapterPlace] = (),
        adapter_room: AdapterRoom | None = None,
        speculation: Speculation | None = None,
        encoded: bool = False,
        embedding_task: str = "",
    ) -> VllmEngine:
        """Make an engine for a checkpoint of safetensors, of which only headers are read.

        `dtype` is "auto", "bfloat16", "float16" or "float32"; `max_context` is prompt and output of
        a request in tokens; `max_batch` bounds the requests of a step. With `verify`, files are
        compared with their ``SHA256SUMS``, if any, when they are first read. One of several `ranks`
        (`executor.join_group`) has its shard. `images` keep packed weights. A prompt has up to
        `prompt_images`, or `prompt_sounds`. Other `adapters` may come to `adapter_room`; that of
        `embedding_task` is the checkpoint's own. Raises `CheckpointError` for damaged files,
        `TaskRefused`, `SeamMoved`, `UnsupportedKvCache`, `UnsupportedPooling`, what vLLM raises.
        """
        checkpoint, where = read_model_config(Path(path)), device or HostDevice()
        media = (prompt_images, prompt_sounds)
        headers = headers_of(checkpoint, task, max(media), speculation)
        lora = BaseAdapters.read(checkpoint, adapters, adapter_room, task, ranks, where)
        kept_as = (path, dtype, ranks, adapters, adapter_room, embedding_task)
        shelf = images.shelf(*kept_as) if images else None
        config = configure(
            (ranks, checkpoint, task, where, media),
            dtype=dtype,
            max_model_len=max_context,
            max_num_seqs=max_batch,
            max_logprobs=max_logprobs,
            **engine_args(task, pooler_config or {}) | lora_arguments(lora.stacks),
            **draft_args(speculation, checkpoint, task, where, ranks, max(media), lora.stacks),
        )
        with recording(*headers, lora.adapters, lora.stacks, embedding_task) as recorded:
            placed = (model, recorded, arena, host, swapper, where, shelf, verify, encoded)
            place = partial(PlacedWeights.place, *placed)
            read = _media_of(checkpoint, config, max(media))
            kv = KvPlacement(arena, f"kv:{model}", max_context, where, place, *read)
            with placing(kv):
                core = _start(config, ranks)
                return cls(model, core, kv, host, swapper, task, reasoning_parser, lora)

    # --- weights ---------------------------------------------------------------------------------

    def store_weights(self, host_offsets: Sequence[int], *, fill: bool) -> int:
        return self._placed.store(host_offsets, fill=fill)

    def begin_load(self) -> Transfer:
        return self._placed.weights.begin_load()

    def put_adapters(
        self, adapters: Sequence[AdapterPlace], slots: Sequence[int], *, image: bool
    ) -> None:
        found = self._adapters.read(adapters, slots)
        self._placed.put_adapters(found, slots, master=image)
        self._adapters.change(found)

    def evict_weights(self) -> None:
        self._device.settle()  # another thread unmaps them, and asks nothing
        self._placed.weights.evict()

    def retire(self) -> None:
        """What is left are vLLM's objects, which go when Python collects them, or with the
        process. Nothing of this one may be used any more."""
        for request in list(self._scheduler.requests):
            self.forget(request)
        device, null_block = self._device, self._cache.null_block
        try:
            self.evict_weights()
            self._placed.weights.region.release()
            self._cache.region.release()
        finally:
            _forget_checkpoints()
            vars(self).clear()
            device.retired(null_block)

    def verify(self) -> Verdict:
        return self._placed.compare()

    # --- requests --------------------------------------------------------------------------------

    def prepare(self, body: bytes) -> None:
        params = decode_request(body).sampling_params
        if params is not None and params.structured_outputs is not None:
            self._guides.prepare(params.structured_outputs)

    def add(self, sequence: SequenceSpec) -> None:
        """Raises `ValueError` for a known id, a context too long, a body that says what cannot be
        obeyed (of which a guide may be one), and for what is not the model's task."""
        name = sequence.request
        if name in self._scheduler.requests:
            raise ValueError(f"request {name} is known already")
        asked = decode_request(sequence.body)
        _check_prompt(asked, sequence, self._scheduler.max_model_len, self._vocabulary)
        adapter = self._adapters.asked(asked)
        params = asked.sampling_params
        if params is not None:
            self._check_sampling(params, sequence)
        elif asked.pooling_params is not None:
            self._check_pooling(asked, sequence)
        salt = _cache_salt(sequence.prefix_salt, asked.cache_salt)
        images = self._images.take(
            asked, sequence, salt or "", "" if adapter is None else adapter.lora_path
        )
        request = Request(
            name,
            list(sequence.prompt),
            params,
            asked.pooling_params,
            mm_features=images,
            lora_request=adapter,
            cache_salt=salt,
            block_hasher=self._hasher,
            reasoning_ended=asked.reasoning_ended,
            reasoning_parser_kwargs=asked.reasoning_parser_kwargs,
        )
        if request.use_structured_output:
            self._guides.attach(request, sequence.output)
        else:
            request.append_output_token_ids(list(sequence.output))
        request.status = RequestStatus.RUNNING
        request.prefill_stats = None
        self._states.add(sequence, asked, adapter, images)
        self._scheduler.requests[name] = request

    def _check_sampling(self, params: SamplingParams, sequence: SequenceSpec) -> None:
        """Raises `ValueError`."""
        if self._task.pools:
            raise ValueError(f"{self.model} does not generate text")
        config = self._core.vllm_config.model_config
        check_sampling(params, config, len(sequence.prompt), len(sequence.output))
        if params.thinking_token_budget is not None:
            self._budgets.allow()

    def _check_pooling(self, asked: EngineCoreRequest, sequence: SequenceSpec) -> None:
        """Raises `ValueError`."""
        if not self._task.pools:
            raise ValueError(f"{self.model} generates text and nothing else")
        if sequence.output:
            raise ValueError(f"nothing follows the prompt of request {sequence.request}")
        try:
            complete_pooling(
                self._task,
                asked.pooling_params,
                self._core.vllm_config.model_config,
                self._runner.get_model(),
                len(sequence.prompt),
            )
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error

    def knows(self, request: RequestId) -> bool:
        return request in self._scheduler.requests

    def forget(self, request: RequestId) -> None:
        self._stepping = None
        self._cache.join(request)
        self._device.settle()  # a prompt that has begun: its blocks are being emptied
        self._scheduler.finish_requests(request, RequestStatus.FINISHED_ABORTED)
        self._forget_state(request)

    def prefill(self, request: RequestId, kv_slabs: int) -> list[Produced]:
        self.begin_prefill(request, kv_slabs)
        try:
            while True:
                if produced := self.step((), kv_slabs, (request,), self._step_tokens):
                    return produced
        except BaseException:
            self._withdraw(self._known(request))
            raise

    def begin_prefill(self, request: RequestId, kv_slabs: int) -> None:
        """Raises `ValueError` for a request that has begun, or is computed."""
        known = self._known(request)
        if known.num_computed_tokens or self._scheduler.has_blocks(request):
            raise ValueError(f"request {request} is computed already")
        self._cache.begin(known, kv_slabs, self._images.begin)
        self._states.open_prompt(known)
        self._stepping = None
        # A chunk that is not the last draws a token too, which vLLM throws away. It must not
        # come from the request's own generator: vLLM cannot wind that back on a CPU.
        self._states.take_generator(request)

    def tokens_left(self, request: RequestId) -> int:
        known = self._known(request)
        return int(known.num_tokens - known.num_computed_tokens)

    def step(
        self,
        requests: Sequence[RequestId],
        kv_slabs: int,
        prompts: Sequence[RequestId] = (),
        chunk_tokens: int = 0,
    ) -> list[Produced]:
        """Raises `ValueError` when there are too many, when one does not have its KV in place, and
        for a prompt that has not begun, or an empty chunk."""
        # Nothing moved since the last step if it was of the same list: the usual case by far.
        if requests is not self._stepping:
            self._batch = self._check(requests)
            self._cache.wait_for(requests)
            self._stepping = requests
        batch = self._batch
        decoding = len(batch) + self._drafts.cut(batch, prompts)
        # vLLM's buffers are for so many tokens.
        chunk = min(chunk_tokens, self._step_tokens - decoding)
        if self.kv.windows:
            chunk = min(chunk, STEP_TOKENS)
        if self._states.any_scored(prompts):
            chunk = min(chunk, SCORED_TOKENS)
        computing = self._check_prompts(prompts, len(batch), chunk) if prompts else []
        if self._whole_prompts and computing:
            # One with a sound: vLLM puts what it encodes for several behind each other in the order
            # of its queue, and their blocks in that of its batch.
            alone = self._task is Task.TRANSCRIPTION
            computing, chunk = _whole(computing, 0 if alone else chunk)
        if not batch and not computing:
            return []
        self._cache.prepare(batch, computing, kv_slabs)
        if not computing:
            produced = self._execute(batch, decoding)
            self._cache.keep_states(batch, kv_slabs)
            return produced
        done = self._complete(computing, chunk)
        produced = self._execute([*batch, *computing], decoding + chunk)
        self._cache.keep_states([*batch, *computing], kv_slabs)
        for known in computing:
            if known.request_id in done:
                self._cache.end(known)
        drew = {one.request for one in produced}
        assert drew.intersection(prompts) == done, f"vLLM completed {drew}, not {done}"
        return produced

    # --- KV --------------------------------------------------------------------------------------

    def swap_out(self, request: RequestId, host_offsets: Sequence[int]) -> Transfer:
        """Each place takes one block of ``kv.block_bytes``; places beyond the last are not used.

        Full blocks stay cached, cold once no other request uses them.
        """
        known = self._resident(request)
        self._stepping = None
        return self._cache.swap_out(known, host_offsets)

    def swap_in(self, request: RequestId, host_offsets: Sequence[int], kv_slabs: int) -> Transfer:
        """The places are those of `swap_out`, of this engine or of another one of the model.

        Blocks that the cache still has are not copied; the bytes are those of the others.
        """
        known = self._known(request)
        if self._scheduler.has_blocks(request) or not known.num_output_tokens:
            raise ValueError(f"request {request} has no KV elsewhere")
        self._stepping = None
        return self._cache.swap_in(known, host_offsets, kv_slabs)

    def trim(self, keep_slabs: int | None = None) -> KvUse:
        return self._cache.trim(keep_slabs)

    def kv_use(self) -> KvBytes:
        return self._cache.use()._replace(image_bytes=self._images.bytes)

    def draft_use(self) -> DraftUse:
        return self._drafts.use

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _step_tokens(self) -> int:
        """The most that vLLM computes in a step."""
        tokens: int = self._scheduler.max_num_scheduled_tokens
        return tokens

    def _known(self, request: RequestId) -> Request:
        try:
            return self._scheduler.requests[request]
        except KeyError:
            raise ValueError(f"request {request} is not known") from None

    def _resident(self, request: RequestId) -> Request:
        known = self._known(request)
        if known.num_computed_tokens != known.num_tokens - 1:
            raise ValueError(f"request {request} is not computed")
        if not self._scheduler.holds(request, known.num_computed_tokens):
            raise ValueError(f"request {request} does not have its KV on the device")
        return known

    def _withdraw(self, request: Request) -> None:
        """Nothing of the request is computed, and its blocks may be unmapped at once."""
        self._stepping = None
        self._device.settle()  # a step that failed half way, or blocks that are being emptied
        request.spec_token_ids = []
        self._cache.withdraw(request)
        self._images.withdraw(request.request_id)

    def _check(self, requests: Sequence[RequestId]) -> list[Request]:
        batch = [self._resident(request) for request in requests]
        self._check_size(len(batch))
        return batch

    def _check_prompts(
        self, prompts: Sequence[RequestId], others: int, chunk_tokens: int
    ) -> list[Request]:
        """The prompts of a step that also decodes so many others."""
        self._check_size(others + len(prompts))
        if chunk_tokens < 1:
            raise ValueError(f"prompts in chunks of {chunk_tokens} tokens")
        computing = [self._known(request) for request in prompts]
        for known in computing:
            if not self._scheduler.has_begun(known):
                raise ValueError(f"request {known.request_id} has not begun")
        return computing

    def _check_size(self, requests: int) -> None:
        most = self._scheduler.max_num_running_reqs
        if requests > most:
            raise ValueError(f"{requests} requests in a batch of at most {most}")

    def _complete(self, prompts: Sequence[Request], chunk_tokens: int) -> set[RequestId]:
        """The prompts that the next step completes, which draw a token that counts from their own
        generators. vLLM gives each what it lacks, or can reach, until none of the chunk is left."""
        done: set[RequestId] = set()
        for known in prompts:
            lacking = known.num_tokens - known.num_computed_tokens
            computing = self._scheduler.reach(known, lacking)
            chunk_tokens -= computing
            if chunk_tokens < 0:
                break
            if computing == lacking:
                self._states.give_generator(known)
                done.add(known.request_id)
        return done

    def _execute(self, batch: Sequence[Request], tokens: int) -> list[Produced]:
        """One step of vLLM with these requests, and at most so many tokens. If it fails, nothing of
        them is computed."""
        transfer = self._placed.weights.transfer
        if transfer is None:
            raise RuntimeError(f"the weights of {self.model} are not on the device")
        try:
            self._images.enter(batch, tokens)
            gates = self._gates
            at_once = self._as_graph(batch, tokens) or self._images.encoded_by(batch)
            hold = gates.holding_all if at_once else gates.holding
            with hold(transfer), self._scheduler.step_only(batch, tokens):
                outputs, _ = self._core.step()
        except BaseException:
            for known in batch:
                self._withdraw(known)
            raise
        self._images.stepped(batch)
        ready = outputs[0].outputs if 0 in outputs else []
        self._drafts.propose(ready)
        produced = [token for output in ready for token in _produced(output)]
        for place, token in enumerate(produced):
            if token.finished is not None:
                self._stepping = None
                self._forget_state(token.request)
                if token.finished is FinishReason.ERROR:
                    produced[place] = _because_of_guide(token, batch)
        return produced

    def _as_graph(self, batch: Sequence[Request], tokens: int) -> bool:
        """Whether vLLM may run the step as a graph: it does when every request has one token."""
        return self._device.graphs and (
            tokens <= len(batch)
            or all(request.num_tokens - request.num_computed_tokens == 1 for request in batch)
        )

    def _forget_state(self, request: RequestId) -> None:
        """Remove what is left of a finished request."""
        self._states.forget(request)
        self._images.leave(request)
        self._scheduler.finished_req_ids.discard(request)


def configure(
    about: tuple[int, ModelConfig, Task, Device, tuple[int, int]], **chosen: Any
) -> VllmConfig:
    """vLLM's configuration of an engine: `chosen` for it, the rest follows from what it is `about`:
    ranks, model, task, device, and the most images and sounds of a prompt. Raises `SeamMoved`,
    `UnsupportedPooling`."""
    check_seams()
    ranks, checkpoint, task, device, most = about
    parameters.forbid_packing()
    register_types()
    encoder = task is Task.TRANSCRIPTION or (task.pools and checkpoint.is_encoder)
    whole = max(chosen["max_model_len"], encoder_tokens(checkpoint)) if encoder else 0
    images, sounds = most
    if task is Task.TRANSCRIPTION or sounds:
        media = sound_args(checkpoint, ranks, device, sounds)
    else:
        media = image_args(images, checkpoint, ranks, device)
    config = EngineArgs(
        max_num_batched_tokens=max(BATCHED_TOKENS, chosen["max_num_seqs"], whole),
        # vLLM would not do it for means; `pool_in_chunks` does.
        enable_chunked_prefill=not encoder,
        block_size=BLOCK_TOKENS,
        load_format=LOAD_FORMAT,
        use_tqdm_on_load=False,
        trust_remote_code=False,
        config_format="hf",  # the file that the daemon reads, where there are others, too
        enable_prefix_caching=not encoder and not keeps_state(checkpoint),
        prefix_caching_hash_algo="sha256_cbor",  # the default would serialise with pickle
        disable_hybrid_kv_cache_manager=False,
        async_scheduling=False,
        # Any figure spares vLLM its own estimate; `ArenaWorker` gives the true one.
        kv_cache_memory_bytes=1,
        tensor_parallel_size=ranks,
        distributed_executor_backend="uni" if ranks == 1 else "external_launcher",
        scheduler_cls=ParkedScheduler,
        model=str(checkpoint.path),
        attention_backend=attention(checkpoint, device),
        **device.engine_args,
        **media,
        **chosen,
    ).create_engine_config()
    if is_compressed(checkpoint) and device.host_memory and not keeps_state(checkpoint):
        # vLLM turns it off with MLA's reference kernels, which divide no prompt by themselves; they
        # do attend to what was computed before.
        config.cache_config.enable_prefix_caching = True
    check_pooling(task, config.model_config, checkpoint)
    if checkpoint.architecture in MEDIA and not any(most):
        name_as_text(config)
    return config


def headers_of(
    checkpoint: ModelConfig, task: Task, media: int, speculation: Speculation | None
) -> tuple[Sequence[WeightFile], Sequence[WeightFile], Sequence[WeightFile]]:
    """Of a checkpoint's files, with the tensors that are loaded, of those of dense layers behind
    the pooling, and of those of a head that drafts. Raises `CheckpointError`."""
    path, architecture = checkpoint.path, checkpoint.architecture
    files = [read_header(file) for file in weight_files(path)]
    if not media:
        files = [language_tensors(file, architecture) for file in files]
    dense = dense_files(path) if task is Task.EMBED else []
    return files, [read_header(file) for file in dense], head_files(speculation)


def _media_of(checkpoint: ModelConfig, config: VllmConfig, most: int) -> tuple[int, int, int]:
    """How many images or sounds a prompt has at most, the bytes of what is made of each of their
    tokens, and how many tokens are made of a sound for cross attention."""
    number_bytes = config.model_config.dtype.itemsize
    token_bytes = image_token_bytes(checkpoint, number_bytes) if most else 0
    return most, token_bytes, encoder_tokens(checkpoint)


def _read_by(
    task: Task, core: EngineCore, runner: GPUModelRunner, shape: KvShape
) -> ImagePrompts | SoundPrompts:
    """What prompts have besides text."""
    if task is Task.TRANSCRIPTION:
        return SoundPrompts(core.vllm_config, core.scheduler, runner)
    return ImagePrompts(core.vllm_config, core.scheduler, runner, shape)


def _check_prompt(
    asked: EngineCoreRequest, sequence: SequenceSpec, max_context: int, vocabulary: int
) -> None:
    """Raises `ValueError`."""
    if asked.prompt_embeds is not None:
        raise ValueError("prompts are made of tokens, images and sounds, not of embeddings")
    tokens = len(sequence.prompt) + len(sequence.output)
    if not sequence.prompt or tokens > max_context - (asked.sampling_params is not None):
        raise ValueError(f"{tokens} tokens leave no room in {max_context}")
    if max(sequence.prompt) >= vocabulary:
        raise ValueError(f"token {max(sequence.prompt)} is beyond the model's vocabulary")
    if min(sequence.prompt) < 0:
        raise ValueError(f"{min(sequence.prompt)} is not a token")


def _start(config: VllmConfig, ranks: int) -> EngineCore:
    """Have vLLM build the model, its scheduler and its worker, within `placing`."""
    ensure_expert_group(config)
    executor = UniProcExecutor if ranks == 1 else RankExecutor
    return EngineCore(config, executor, log_stats=False)


def _forget_checkpoints() -> None:
    """Drop what vLLM knows by the paths of checkpoints: others may come to lie there."""
    for known in (
        get_pooling_config,
        get_sentence_transformer_tokenizer_config,
        try_get_dense_modules,
        cached_get_tokenizer,
    ):
        known.cache_clear()


def _cache_salt(prefix_salt: str, cache_salt: str | None) -> str | None:
    """vLLM's salt for a pair of them; no two pairs have the same, as the first has no colon."""
    return f"{prefix_salt}:{cache_salt or ''}" if prefix_salt or cache_salt else None


def _produced(output: EngineCoreOutput) -> list[Produced]:
    """The tokens of a request in a step. What is said besides goes with the last: only drafts give
    more than one, and only to requests of which there is nothing to say about each."""
    name, finish, drafted = output.request_id, output.finish_reason, output.new_token_ids[:-1]
    del output.new_token_ids[:-1]
    last = Produced(
        name,
        NO_TOKEN if output.pooling_output is not None else _only(output.new_token_ids),
        None if finish is None else _FINISH[finish],
        None if _is_plain(output) else encode_output(output),
        output.prefill_stats.num_cached_tokens if output.prefill_stats is not None else 0,
    )
    return [*(Produced(name, token) for token in drafted), last]


def _because_of_guide(token: Produced, batch: Sequence[Request]) -> Produced:
    """The last token of a request that vLLM ended with an error, with the reason if that is known:
    its guide took too long."""
    ended = next(known for known in batch if known.request_id == token.request)
    if took_too_long(ended):
        return msgspec.structs.replace(token, finished=FinishReason.INVALID_GUIDE)
    return token


def _whole(prompts: Sequence[Request], tokens: int) -> tuple[list[Request], int]:
    """The prompts of a step that computes none in parts: the first, and those behind it for as long
    as all have `tokens` tokens at most; and how many tokens these have."""
    taken, total = [prompts[0]], prompts[0].num_tokens
    for prompt in prompts[1:]:
        if total + prompt.num_tokens > tokens:
            break
        taken.append(prompt)
        total += prompt.num_tokens
    return taken, total


def _only(tokens: Sequence[int]) -> int:
    (token,) = tokens
    return token


def _is_plain(output: EngineCoreOutput) -> bool:
    """Whether it is a token and nothing else, as nearly all are."""
    return (
        output.new_logprobs is None
        and output.new_prompt_logprobs_tensors is None
        and output.pooling_output is None
        and output.stop_reason is None
        and output.prefill_stats is None
    )
