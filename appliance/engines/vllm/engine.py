"""`VllmEngine`: one vLLM engine core in this process, on memory that comes and goes.

A request is known in two places: vLLM's scheduler (`Request`: tokens, blocks) and its model
runner (`CachedRequestState`: the same, as the computation sees them). Both are made by `add` and
removed by `forget`, and in between a request is in one of four states:

    added     no blocks, nothing computed      -> `prefill`, `begin_prefill`, or `swap_in`
    begun     blocks for all tokens            -> `step`, as a prompt
    resident  blocks for all computed tokens   -> `step`, `swap_out`
    swapped   no blocks, tokens computed       -> `swap_in`

All tokens but the last are computed once a request has produced one.

Full blocks are cached by the hash of their tokens and all before them, while they are in use and,
cold, afterwards. `prefill` computes, and `swap_in` copies, only what is not found there. A step
that fails leaves its requests added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from vllm import SamplingParams
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
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from appliance.checkpoints.safetensors import read_header, weight_files
from appliance.checkpoints.task import PoolerValue
from appliance.engines.protocol import (
    NO_TOKEN,
    KvBytes,
    KvExhausted,
    KvUse,
    Produced,
    SequenceSpec,
    Verdict,
)
from appliance.engines.vllm.device import Device, HostDevice
from appliance.engines.vllm.executor import RankExecutor
from appliance.engines.vllm.gates import Gates
from appliance.engines.vllm.guides import Guides
from appliance.engines.vllm.messages import (
    MAX_OUTPUT_BYTES,
    decode_request,
    encode_output,
)
from appliance.engines.vllm.placement import KvPlacement, placing
from appliance.engines.vllm.pooling import (
    check_pooling,
    complete_pooling,
    engine_args,
    pool_in_chunks,
)
from appliance.engines.vllm.reasoning import ThinkingBudgets, parser_of
from appliance.engines.vllm.sampling import seeded_generator
from appliance.engines.vllm.scheduler import ParkedScheduler
from appliance.engines.vllm.seams import check_seams
from appliance.engines.vllm.weights import parameters
from appliance.engines.vllm.weights.loading import CheckpointImage, made_from
from appliance.engines.vllm.weights.recipe import LOAD_FORMAT, Recording, recording
from appliance.engines.vllm.weights.tensors import bytes_at
from appliance.kernels.reference import fingerprint
from appliance.memory.arena import Arena, PoolExhausted, Region
from appliance.memory.host_tier import HostTier
from appliance.memory.kv_pool import BLOCK_TOKENS
from appliance.memory.streams import Copy
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferKind
from appliance.memory.weight_cache.images import ImageFolder, KeptImage, Shelf
from appliance.memory.weight_cache.pipeline import process_cpus
from appliance.memory.weights import DeviceWeights
from appliance.vocabulary import FinishReason, KvShape, ModelName, RequestId, Task

BATCHED_TOKENS: Final = 2048
SCORED_TOKENS: Final = 256
"""Of prompts in a step where one wants log probabilities of its prompt: they take memory for so
many times the vocabulary."""
ALL_LOGPROBS: Final = -1
"""vLLM's word for as many log probabilities as there are tokens."""
LOGPROB_BYTES: Final = 8
"""Of one log probability of a prompt's token, with the token that it is of."""

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
        weights: PlacedWeights,
        arena: Arena,
        host: HostTier,
        swapper: Swapper,
        task: Task,
        reasoning_parser: str,
    ) -> None:
        """Use `build`."""
        self.model = model
        self._task = task
        self._core = core
        self._scheduler: ParkedScheduler = core.scheduler
        self._runner: GPUModelRunner = core.model_executor.driver_worker.worker.model_runner
        self._host = host
        self._swapper = swapper
        self._pool = placement.pool
        geometry = placement.geometry
        self.kv = KvShape(
            block_tokens=BLOCK_TOKENS,
            block_bytes=geometry.block_bytes,
            group_blocks=geometry.group_blocks,
            group_slabs=geometry.group_slabs,
        )
        self._kv_addresses = range(
            placement.region.address,
            placement.region.address + geometry.layers * geometry.layer_bytes,
        )
        self._geometry = geometry
        self._kv_region = placement.region
        self._arriving: dict[RequestId, list[Transfer]] = {}
        """Swaps inwards of what a request's blocks hold, that may not be over."""
        self._device = placement.device
        self._weights, self._packings, self._kept = weights
        model_of_vllm = self._runner.get_model()
        pool_in_chunks(task, core.vllm_config.model_config, model_of_vllm)
        parameters.check_moved(model_of_vllm, self._weights, self._packings, self._kv_addresses)
        self._gates = Gates(model_of_vllm, self._weights, self._device)
        layout = self._weights.layout
        self.weight_slabs = layout.slabs(arena.slab_bytes)
        self.host_slabs = self.weight_slabs
        self.layout_digest = layout.digest
        self._stepping: Sequence[RequestId] | None = None
        """The list that `_batch` holds the requests of, while nothing else moved them."""
        self._batch: list[Request] = []
        config = core.vllm_config.model_config
        self._vocabulary: int = config.get_vocab_size()
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
    ) -> VllmEngine:
        """Make an engine for a checkpoint of safetensors, of which only headers are read.

        `dtype` is "auto", "bfloat16", "float16" or "float32"; `max_context` is prompt and output
        of a request in tokens; `max_batch` bounds the requests of a step. With `verify`, the files
        are compared with ``SHA256SUMS``, if that lies beside them, when they are first read. One
        of several `ranks` (see `executor.join_group`) has its shard of the model. It computes on
        `device`: the CPU, if None. Packed weights are kept in the folder of `images`, if any.
        `reasoning_parser` is vLLM's name of what knows the model's reasoning; empty: it has none.
        `max_logprobs` bounds the log probabilities of a token, and `pooler_config` has keys of
        vLLM's `PoolerConfig`.

        Raises `SeamMoved` for another vLLM or torch, `UnsupportedKvCache` for a model whose KV
        cache has several shapes, `CheckpointError` (`UnsupportedCheckpoint`) for files that are
        damaged, or do not become the model's weights by copying, `UnsupportedPooling` for one that
        cannot do its `task` here, and whatever vLLM raises for a checkpoint that it cannot load.
        """
        check_seams()
        files = [read_header(file) for file in weight_files(Path(path))]
        parameters.forbid_packing()
        where: Device = device or HostDevice()
        shelf = images.shelf(path, dtype, ranks) if images is not None else None
        placed: list[PlacedWeights] = []

        def place(built: torch.nn.Module) -> Region:
            placed.append(
                PlacedWeights.place(
                    model, built, recorded, arena, host, swapper, where, shelf, verify=verify
                )
            )
            return placed[0].weights.region

        placement = KvPlacement(arena, f"kv:{model}", -(-max_context // BLOCK_TOKENS), where, place)
        config = EngineArgs(
            model=path,
            dtype=dtype,
            max_model_len=max_context,
            max_num_seqs=max_batch,
            max_logprobs=max_logprobs,
            max_num_batched_tokens=max(BATCHED_TOKENS, max_batch),
            block_size=BLOCK_TOKENS,
            load_format=LOAD_FORMAT,
            use_tqdm_on_load=False,
            trust_remote_code=False,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",  # the default would serialise with pickle
            disable_hybrid_kv_cache_manager=True,
            async_scheduling=False,
            # Any figure spares vLLM its own estimate; `ArenaWorker` gives the true one.
            kv_cache_memory_bytes=1,
            tensor_parallel_size=ranks,
            distributed_executor_backend="uni" if ranks == 1 else "external_launcher",
            scheduler_cls=ParkedScheduler,
            **engine_args(task, pooler_config or {}),
            **where.engine_args,
        ).create_engine_config()
        check_pooling(task, config.model_config)
        try:
            with placing(placement), recording(files) as recorded:
                executor = UniProcExecutor if ranks == 1 else RankExecutor
                core = EngineCore(config, executor, log_stats=False)
            return cls(
                model, core, placement, placed[0], arena, host, swapper, task, reasoning_parser
            )
        except BaseException:
            placement.discard()
            raise

    # --- weights ---------------------------------------------------------------------------------

    def store_weights(self, host_offsets: Sequence[int], *, fill: bool) -> None:
        self._weights.store(host_offsets, fill=fill)
        master, kept = self._weights.master, self._kept
        if fill and master is not None and kept is not None and kept.packed:
            kept.keep(master, host_offsets)

    def begin_load(self) -> Transfer:
        return self._weights.begin_load()

    def evict_weights(self) -> None:
        self._weights.evict()

    def retire(self) -> None:
        """What is left are vLLM's objects, which go when Python collects them, or with the
        process."""
        for request in list(self._scheduler.requests):
            self.forget(request)
        self.evict_weights()
        self._weights.region.release()
        self._kv_region.release()
        # What it knows by the paths of checkpoints: others may come to lie there.
        for known in (
            get_pooling_config,
            get_sentence_transformer_tokenizer_config,
            try_get_dense_modules,
            cached_get_tokenizer,
        ):
            known.cache_clear()

    def verify(self) -> Verdict:
        master, region = self._weights.master, self._weights.region
        if not self._weights.loaded:
            return Verdict.NOT_LOADED
        if master is None:
            return Verdict.NO_IMAGE
        # Tensor by tensor: what lies between them belongs to none, and may differ.
        layout = self._weights.layout
        for tensor, start in zip(layout.tensors, layout.offsets, strict=True):
            device = region.address + start
            for address, size in master.parts(start, tensor.nbytes):
                here = self._device.bytes_at(device, size)
                if fingerprint(here) != fingerprint(bytes_at(address, size)):
                    return Verdict.DIFFERS
                device += size
        return Verdict.OK

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
        if asked.mm_features or asked.lora_request or asked.prompt_embeds is not None:
            raise ValueError("prompts are made of tokens only, and adapters are not supported")
        params, pooling = asked.sampling_params, asked.pooling_params
        tokens = len(sequence.prompt) + len(sequence.output)
        most = self._scheduler.max_model_len - (params is not None)
        if not sequence.prompt or tokens > most:
            raise ValueError(f"{tokens} tokens leave no room in {self._scheduler.max_model_len}")
        if max(sequence.prompt) >= self._vocabulary:
            raise ValueError(f"token {max(sequence.prompt)} is beyond the model's vocabulary")
        if min(sequence.prompt) < 0:
            raise ValueError(f"{min(sequence.prompt)} is not a token")
        generator = None
        if params is not None:
            self._check_sampling(params, sequence)
            generator = seeded_generator(params, len(sequence.output))
        elif pooling is not None:
            self._check_pooling(asked, sequence)
        request = Request(
            name,
            list(sequence.prompt),
            params,
            pooling,
            cache_salt=asked.cache_salt,
            block_hasher=self._core.request_block_hasher,
            reasoning_ended=asked.reasoning_ended,
            reasoning_parser_kwargs=asked.reasoning_parser_kwargs,
        )
        if request.use_structured_output:
            self._guides.attach(request, sequence.output)
        else:
            request.append_output_token_ids(list(sequence.output))
        request.status = RequestStatus.RUNNING
        request.prefill_stats = None
        self._scheduler.requests[name] = request
        self._runner.requests[name] = CachedRequestState(
            req_id=name,
            prompt_token_ids=list(sequence.prompt),
            mm_features=[],
            sampling_params=params,
            pooling_params=pooling,
            generator=generator,
            block_ids=([],),
            num_computed_tokens=0,
            output_token_ids=list(sequence.output),
        )

    def _check_sampling(self, params: SamplingParams, sequence: SequenceSpec) -> None:
        """Raises `ValueError`. The front end has checked all of it for its own configuration, but
        what is wrong here would end the whole worker."""
        if self._task is not Task.GENERATE:
            raise ValueError(f"{self.model} does not generate text")
        try:
            params.verify(self._core.vllm_config.model_config, None, None, None)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error
        if params.max_tokens is None or params.max_tokens <= len(sequence.output):
            raise ValueError(f"max_tokens {params.max_tokens} leave no room for another token")
        if params.prompt_logprob_token_ids is not None or params.trace_decode_token_ids is not None:
            raise ValueError(
                "prompt_logprob_token_ids and trace_decode_token_ids are not supported"
            )
        for asked in (params.logprobs, params.prompt_logprobs):
            if asked is not None and asked > self._vocabulary:
                raise ValueError(
                    f"there are no {asked} log probabilities of a token, as the vocabulary has "
                    f"{self._vocabulary}"
                )
        if params.prompt_logprobs is not None:
            each = self._asked_of(params.prompt_logprobs)
            size = len(sequence.prompt) * (each + 2) * LOGPROB_BYTES
            if size > MAX_OUTPUT_BYTES:
                raise ValueError(
                    f"prompt_logprobs of {len(sequence.prompt)} tokens take {size} bytes, more "
                    f"than {MAX_OUTPUT_BYTES}: ask for fewer, or for a shorter prompt"
                )
        if params.thinking_token_budget is not None:
            self._budgets.allow()

    def _asked_of(self, logprobs: int) -> int:
        """How many log probabilities of a token a request asks for."""
        return self._vocabulary if logprobs == ALL_LOGPROBS else logprobs

    def _check_pooling(self, asked: EngineCoreRequest, sequence: SequenceSpec) -> None:
        """Raises `ValueError`."""
        if self._task is Task.GENERATE:
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
        for arriving in self._arriving.pop(request, ()):
            arriving.join()  # its blocks are free from here on, so nothing may write there
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
        if known.num_computed_tokens or self._scheduler.blocks_held(request):
            raise ValueError(f"request {request} is computed already")
        known.num_computed_tokens = self._hold(known, known.num_tokens, kv_slabs)
        if known.num_computed_tokens:
            for arriving in self._under_way():
                self._device.wait(arriving)
        self._open_prompt(known)
        # Its blocks are its own from here on: requests that decode beside it take theirs, too.
        self._place(known, self._scheduler.fill(known, known.num_tokens))
        # A chunk that is not the last draws a token too, which vLLM throws away. It must not
        # come from the request's own generator: vLLM cannot wind that back on a CPU.
        self._runner.requests[request].generator = None

    def _open_prompt(self, request: Request) -> None:
        """Have the first output tell of the prompt: how much of it was cached, and how probable
        its tokens are. A request that has an output already has told that."""
        name, params = request.request_id, request.sampling_params
        self._runner.num_prompt_logprobs.pop(name, None)
        self._runner.requests[name].in_progress_prompt_logprobs_cpu = None
        request.prefill_stats = None
        if request.num_output_tokens:
            return
        if request.num_computed_tokens:
            request.prefill_stats = PrefillStats()
            request.prefill_stats.set(request.num_prompt_tokens, request.num_computed_tokens, 0)
        if params is not None and params.prompt_logprobs is not None:
            self._runner.num_prompt_logprobs[name] = self._asked_of(params.prompt_logprobs)

    def tokens_left(self, request: RequestId) -> int:
        known = self._known(request)
        left: int = known.num_tokens - known.num_computed_tokens
        return left

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
            self._await_kv(requests)
            self._stepping = requests
        batch = self._batch
        # vLLM's buffers are for so many tokens.
        chunk = min(chunk_tokens, self._step_tokens - len(batch))
        if not self._runner.num_prompt_logprobs.keys().isdisjoint(prompts):
            chunk = min(chunk, SCORED_TOKENS)
        computing = self._check_prompts(prompts, len(batch), chunk) if prompts else []
        if not batch and not computing:
            return []
        # A resident request has all blocks but that of its last token, if this begins one.
        needed = sum(known.num_computed_tokens % BLOCK_TOKENS == 0 for known in batch)
        self._provide(needed, kv_slabs)
        if not computing:
            return self._execute(batch, len(batch))
        done = self._complete(computing, chunk)
        produced = self._execute([*batch, *computing], len(batch) + chunk)
        drew = {one.request for one in produced}
        assert drew.intersection(prompts) == done, f"vLLM completed {drew}, not {done}"
        return produced

    # --- KV --------------------------------------------------------------------------------------

    def swap_out(self, request: RequestId, host_offsets: Sequence[int]) -> Transfer:
        """Each place takes one block of ``kv.block_bytes``; places beyond the last are not used.

        Full blocks stay cached, cold once no other request uses them.
        """
        known = self._resident(request)
        self._await_kv([request])
        places = self._places(host_offsets, self._scheduler.blocks_held(request))
        leaving = self._scheduler.take_blocks(request)
        blocks = [block.block_id for block in leaving]
        self._place(known, [])
        return self._swapper.start(
            TransferKind.KV_OUT,
            self._kv_owner,
            [
                Copy(
                    place,
                    self._block_address(block),
                    self._geometry.layer_block_bytes,
                    rows=self._geometry.layers,
                    destination_pitch=self._geometry.layer_block_bytes,
                    source_pitch=self._geometry.layer_bytes,
                )
                for block, place in zip(blocks, places, strict=True)
            ],
            nbytes=len(blocks) * self._geometry.block_bytes,
            reads=[(self.model, block) for block in blocks],
            writes=places,
            then=lambda transfer: self._scheduler.give_blocks(leaving),
        )

    def swap_in(self, request: RequestId, host_offsets: Sequence[int], kv_slabs: int) -> Transfer:
        """The places are those of `swap_out`, of this engine or of another one of the model.

        Blocks that the cache still has are not copied; the bytes are those of the others.
        """
        known = self._known(request)
        computed = known.num_tokens - 1
        if self._scheduler.blocks_held(request) or not known.num_output_tokens:
            raise ValueError(f"request {request} has no KV elsewhere")
        places = self._places(host_offsets, self.kv.blocks(computed))
        cached = self._hold(known, computed, kv_slabs) // BLOCK_TOKENS
        blocks = self._scheduler.fill(known, computed)
        self._scheduler.filled(known, computed)
        known.num_computed_tokens = computed
        self._place(known, blocks)
        # Cached blocks may be still on their way in, for others.
        shared = self._under_way() if cached else []
        transfer = self._swapper.start(
            TransferKind.KV_IN,
            self._kv_owner,
            [
                Copy(
                    self._block_address(block),
                    place,
                    self._geometry.layer_block_bytes,
                    rows=self._geometry.layers,
                    destination_pitch=self._geometry.layer_bytes,
                    source_pitch=self._geometry.layer_block_bytes,
                )
                for block, place in zip(blocks[cached:], places[cached:], strict=True)
            ],
            nbytes=(len(blocks) - cached) * self._geometry.block_bytes,
            reads=places[cached:],
            writes=[(self.model, block) for block in blocks[cached:]],
        )
        self._arriving[request] = [*shared, transfer]
        return transfer

    def trim(self, keep_slabs: int | None = None) -> KvUse:
        self._scheduler.blocks.trim(keep_slabs)
        return KvUse(self._pool.mapped_slabs, self._pool.cold_slabs)

    def kv_use(self) -> KvBytes:
        pool, size = self._pool, self.kv.block_bytes
        return KvBytes(
            pool.mapped_bytes, pool.used * size, pool.cold * size, pool.peak_mapped_bytes
        )

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
        held = self._scheduler.blocks_held(request)
        if held != -(-known.num_computed_tokens // BLOCK_TOKENS):
            raise ValueError(f"request {request} does not have its KV on the device")
        return known

    @property
    def _kv_owner(self) -> str:
        return f"kv:{self.model}"

    def _block_address(self, block: int) -> int:
        """Of its part in the first layer; that of the next lies ``layer_bytes`` behind."""
        return self._kv_addresses.start + block * self._geometry.layer_block_bytes

    def _places(self, host_offsets: Sequence[int], blocks: int) -> list[int]:
        """Addresses of the first `blocks` places in the host tier; its layers lie side by side."""
        if len(host_offsets) < blocks:
            raise ValueError(f"{blocks} blocks in {len(host_offsets)} places")
        size = self._geometry.block_bytes
        return [self._host.address(offset, size) for offset in host_offsets[:blocks]]

    def _await_kv(self, requests: Iterable[RequestId]) -> None:
        """Compute comes after its KV is in (Aegaeon §5.3, the first of its rules)."""
        for request in requests:
            for arriving in self._arriving.pop(request, ()):
                self._device.wait(arriving)

    def _under_way(self) -> list[Transfer]:
        """All swaps inwards that are not over."""
        return [t for arriving in self._arriving.values() for t in arriving if not t.done]

    def _place(self, request: Request, blocks: list[int]) -> None:
        """Tell the runner that the request's blocks are others now."""
        self._stepping = None
        self._leave_batch(request.request_id)
        self._runner.requests[request.request_id].block_ids = (list(blocks),)

    def _withdraw(self, request: Request) -> None:
        """Nothing of the request is computed."""
        self._scheduler.withdraw(request)
        if (states := self._runner.requests[request.request_id].pooling_states) is not None:
            states.clean()
        self._place(request, [])
        self._give_generator(request)

    def _hold(self, request: Request, tokens: int, kv_slabs: int) -> int:
        """`ParkedScheduler.hold`; raises `KvExhausted`."""
        try:
            return self._scheduler.hold(request, tokens, kv_slabs)
        except PoolExhausted as exhausted:
            raise KvExhausted(f"{self.model}: {exhausted}") from exhausted

    def _provide(self, blocks: int, kv_slabs: int) -> None:
        """`ElasticBlockPool.provide`; raises `KvExhausted`."""
        try:
            self._scheduler.blocks.provide(blocks, kv_slabs)
        except PoolExhausted as exhausted:
            raise KvExhausted(f"{self.model}: {exhausted}") from exhausted

    def _check(self, requests: Sequence[RequestId]) -> list[Request]:
        batch = [self._resident(request) for request in requests]
        self._check_size(len(batch))
        return batch

    def _check_prompts(
        self, prompts: Sequence[RequestId], others: int, chunk_tokens: int
    ) -> list[Request]:
        """The prompts of a step, beside so many others."""
        self._check_size(others + len(prompts))
        if chunk_tokens < 1:
            raise ValueError(f"prompts in chunks of {chunk_tokens} tokens")
        computing = [self._known(request) for request in prompts]
        for known in computing:
            held = self._scheduler.blocks_held(known.request_id)
            if held != -(-known.num_tokens // BLOCK_TOKENS):
                raise ValueError(f"request {known.request_id} has not begun")
        return computing

    def _check_size(self, requests: int) -> None:
        most = self._scheduler.max_num_running_reqs
        if requests > most:
            raise ValueError(f"{requests} requests in a batch of at most {most}")

    def _complete(self, prompts: Sequence[Request], chunk_tokens: int) -> set[RequestId]:
        """The prompts that the next step completes, which draw a token that counts from their own
        generators. vLLM gives each what it lacks, until none of the chunk is left."""
        done: set[RequestId] = set()
        for known in prompts:
            chunk_tokens -= known.num_tokens - known.num_computed_tokens
            if chunk_tokens < 0:
                break
            self._give_generator(known)
            done.add(known.request_id)
        return done

    def _give_generator(self, request: Request) -> None:
        """The request draws from its own generator from the next step on, if it is to have one."""
        state = self._runner.requests[request.request_id]
        if state.sampling_params is None:
            return
        generator = seeded_generator(state.sampling_params, request.num_output_tokens)
        if generator is not None:
            self._leave_batch(request.request_id)
            state.generator = generator

    def _execute(self, batch: Sequence[Request], tokens: int) -> list[Produced]:
        """One step of vLLM with these requests, and at most so many tokens. If it fails, nothing of
        them is computed."""
        transfer = self._weights.transfer
        if transfer is None:
            raise RuntimeError(f"the weights of {self.model} are not on the device")
        try:
            gates = self._gates
            hold = gates.holding_all if self._as_graph(batch, tokens) else gates.holding
            with hold(transfer), self._scheduler.step_only(batch, tokens):
                outputs, _ = self._core.step()
        except BaseException:
            for known in batch:
                self._withdraw(known)
            raise
        produced = [_produced(o) for o in outputs[0].outputs] if 0 in outputs else []
        for token in produced:
            if token.finished is not None:
                self._stepping = None
                self._forget_state(token.request)
        return produced

    def _leave_batch(self, request: RequestId) -> None:
        """The next step puts it in again, if it is of that."""
        with torch.inference_mode():  # as vLLM does: tensors of the batch were made in it
            self._runner.input_batch.remove_request(request)

    def _as_graph(self, batch: Sequence[Request], tokens: int) -> bool:
        """Whether vLLM may run the step as a graph: it does when every request has one token."""
        return self._device.graphs and (
            tokens <= len(batch)
            or all(request.num_tokens - request.num_computed_tokens == 1 for request in batch)
        )

    def _forget_state(self, request: RequestId) -> None:
        """Remove what the runner knows of a finished request now, not with the next step.

        Until then the id could have come back, and the step would remove the newcomer.
        """
        self._runner.requests.pop(request, None)
        self._runner.num_prompt_logprobs.pop(request, None)
        self._leave_batch(request)
        self._scheduler.finished_req_ids.discard(request)


class PlacedWeights(NamedTuple):
    """The weights of a model that vLLM has built."""

    weights: DeviceWeights
    packings: parameters.Packings
    kept: KeptImage | None

    @classmethod
    def place(
        cls,
        name: ModelName,
        model: torch.nn.Module,
        recorded: Recording,
        arena: Arena,
        host: HostTier,
        swapper: Swapper,
        device: Device,
        shelf: Shelf | None,
        *,
        verify: bool,
    ) -> PlacedWeights:
        """Give the model's parameters, which hold nothing yet, their addresses for good.

        Packed ones are kept on the shelf, if there is one; of others it is cleared.
        """
        ingredients = recorded.ingredients(model)
        packings = parameters.pack(model)
        layout = parameters.plan(model, ingredients, packings)
        cpus = process_cpus()
        image = CheckpointImage(
            recorded.files, layout, ingredients, packings, cpus=cpus, verify=verify
        )
        kept = None
        if shelf is not None and image.packs:
            key = made_from(recorded.files, layout, ingredients, verify=verify)
            kept = KeptImage(shelf, key, layout, recorded.files, image, cpus=cpus, verify=verify)
        elif shelf is not None:
            shelf.clear()
        weights = DeviceWeights(
            f"weights:{name}",
            layout,
            arena,
            host,
            swapper,
            kept or image,
            staged=not device.host_memory,
        )
        try:
            parameters.rehome(model, weights, packings, device)
        except BaseException:
            weights.region.release()
            raise
        return cls(weights, packings, kept)


def _produced(output: EngineCoreOutput) -> Produced:
    finish = output.finish_reason
    return Produced(
        output.request_id,
        NO_TOKEN if output.pooling_output is not None else _only(output.new_token_ids),
        None if finish is None else _FINISH[finish],
        None if _is_plain(output) else encode_output(output),
    )


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
