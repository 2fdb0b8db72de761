"""The KV cache of one engine: blocks for its requests, and copies to the host tier and back.

The blocks of each request are recorded in vLLM's scheduler (`ParkedScheduler`) and, for the
computation, in its model runner (`RunnerStates`). Copies run during compute: a request computes
once its own copies are in, and blocks that were swapped out are free once their copy is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vllm.v1.request import Request

from appliance.engines.protocol import KvBytes, KvExhausted, KvUse
from appliance.engines.vllm.kv.placement import KvPlacement
from appliance.engines.vllm.runner_states import RunnerStates
from appliance.engines.vllm.scheduler import ParkedScheduler
from appliance.memory.arena import PoolExhausted
from appliance.memory.host_tier import HostTier
from appliance.memory.streams import Copy
from appliance.memory.swapper import Swapper
from appliance.memory.transfers import Transfer, TransferKind
from appliance.vocabulary import KvShape, ModelName, RequestId


class KvCache:
    """The blocks of one model's requests, in the addresses of its placement."""

    def __init__(
        self,
        model: ModelName,
        placement: KvPlacement,
        scheduler: ParkedScheduler,
        states: RunnerStates,
        host: HostTier,
        swapper: Swapper,
    ) -> None:
        self.pool = placement.pool
        self._geometry = geometry = placement.geometry
        self.shape = KvShape(
            block_tokens=placement.block_tokens,
            window_tokens=placement.window_tokens,
            block_bytes=geometry.block_bytes,
            group_blocks=geometry.group_blocks,
            group_slabs=geometry.group_slabs,
            tables=sum(table.grows for table in placement.tables),
            state_blocks=sum(
                table.blocks(1) for table in placement.tables if table.has_state or table.encoded
            ),
            windows=tuple(table.window for table in placement.tables if table.window),
            step_blocks=max((t.step_blocks for t in placement.tables if t.window), default=0),
            snapshot_blocks=scheduler.snapshots.blocks if scheduler.snapshots is not None else 0,
            image_token_bytes=placement.image_token_bytes,
            most_images=placement.most_images,
        )
        self.region = placement.region
        self.addresses = range(
            self.region.address, self.region.address + geometry.layers * geometry.layer_bytes
        )
        self.null_block = placement.null_block
        """The slots with memory in which the block lies that vLLM calls null."""
        self._model = model
        self._device = placement.device
        self._scheduler = scheduler
        self._states = states
        self._host = host
        self._swapper = swapper
        self._arriving: dict[RequestId, list[Transfer]] = {}
        """Swaps inwards of what a request's blocks hold, that may not be over."""
        self._prompts: dict[RequestId, Request] = {}
        """Those that have begun, and are not computed to their end."""

    # --- blocks ----------------------------------------------------------------------------------

    def provide(self, blocks: int, kv_slabs: int) -> None:
        """`ElasticBlockPool.provide`; raises `KvExhausted`."""
        try:
            self._scheduler.blocks.provide(blocks, kv_slabs)
        except PoolExhausted as exhausted:
            raise KvExhausted(f"{self._model}: {exhausted}") from exhausted

    def begin(
        self,
        request: Request,
        kv_slabs: int,
        hold_more: Callable[[Request, Callable[[int], None]], None],
    ) -> None:
        """Take blocks for the prompt of a request that has none: for all its tokens, or as many as
        are held of it at once where layers attend to windows. Tokens found in the prefix cache
        count as computed, and compute comes after their KV is in. `hold_more` then takes what the
        prompt needs besides KV, and is given what makes so many blocks free for that. Raises
        `KvExhausted`, and `TransferFailed` for KV that will not arrive, with nothing taken."""
        tokens = request.num_tokens
        cached = self._hold(request, tokens, kv_slabs, [*self._prompts.values()])

        def provide(blocks: int) -> None:
            """Besides those that prompts that have begun are to take."""
            self.provide(blocks + self._scheduler.needed((), self._prompts.values()), kv_slabs)

        try:
            request.num_computed_tokens = cached
            self._prompts[request.request_id] = request
            if cached:
                for arriving in self._under_way():
                    self._device.wait(arriving)
            # They are its own from here on: requests that decode meanwhile take theirs, too.
            self._states.place(request.request_id, self._scheduler.fill(request, tokens, cached))
            hold_more(request, provide)
        except BaseException:
            self._device.settle()  # blocks that are being emptied may be unmapped at once
            self.withdraw(request)
            raise

    def prepare(self, batch: Sequence[Request], prompts: Sequence[Request], kv_slabs: int) -> None:
        """Have blocks for a step of requests that decode, and of prompts that have begun; where
        their windows move on, they give others back. Raises `KvExhausted` before any does, and
        never for prompts alone."""
        # A resident request has all blocks but that of its last token, if this begins one.
        size = self.shape.step_tokens
        growing = [known for known in batch if known.num_computed_tokens % size == 0]
        if not self.shape.windows:
            self.provide(len(growing) * self.shape.tables, kv_slabs)
            return
        if batch:
            self.provide(self._scheduler.needed(growing, self._prompts.values()), kv_slabs)
        else:
            self.provide(self._scheduler.needed(prompts), kv_slabs)
        growing += prompts
        for known in growing:
            self._slide(known, known.num_computed_tokens)
        # What was given back may be in the prefix cache now, and is free if it is wanted. There is
        # room for it: that is what was provided for above.
        self.provide(self._scheduler.wanted(growing), kv_slabs)
        for known in prompts:
            if self._scheduler.wanted([known]):
                computed = known.num_computed_tokens
                tables = self._scheduler.fill(known, known.num_tokens, computed)
                self._states.place(known.request_id, tables)

    def end(self, prompt: Request) -> None:
        """A prompt is computed to its end: from now on it has the blocks of its windows only."""
        del self._prompts[prompt.request_id]
        self._slide(prompt, prompt.num_computed_tokens - 1)

    def keep_states(self, requests: Iterable[Request], kv_slabs: int) -> None:
        """After a step of these: see `StateSnapshots.keep`."""
        if (snapshots := self._scheduler.snapshots) is not None:
            for known in requests:
                snapshots.keep(known, kv_slabs)

    def withdraw(self, request: Request) -> None:
        """Nothing of a request is computed any more, and it has no blocks."""
        self._prompts.pop(request.request_id, None)
        self._scheduler.withdraw(request)
        self._states.withdraw(request)

    def _slide(self, request: Request, computed: int) -> None:
        """Give back what no token needs that comes after so many `computed` ones."""
        gone = self._scheduler.slide(request, computed)
        if any(gone):
            self._states.empty(request.request_id, gone)

    def _hold(
        self, request: Request, tokens: int, kv_slabs: int, prompts: Sequence[Request] | None
    ) -> int:
        """`ParkedScheduler.hold`; raises `KvExhausted`."""
        try:
            return self._scheduler.hold(request, tokens, kv_slabs, prompts)
        except PoolExhausted as exhausted:
            raise KvExhausted(f"{self._model}: {exhausted}") from exhausted

    def trim(self, keep_slabs: int | None) -> KvUse:
        """See `Engine.trim`."""
        self._scheduler.blocks.trim(keep_slabs)
        return KvUse(self.pool.mapped_slabs, self.pool.cold_slabs)

    def use(self) -> KvBytes:
        """See `Engine.kv_use`."""
        pool, size = self.pool, self.shape.block_bytes
        return KvBytes(
            pool.mapped_bytes, pool.used * size, pool.cold * size, pool.peak_mapped_bytes
        )

    # --- copies ----------------------------------------------------------------------------------

    def wait_for(self, requests: Iterable[RequestId]) -> None:
        """Compute comes after its KV is in (Aegaeon §5.3, the first of its rules)."""
        for request in requests:
            for arriving in self._arriving.pop(request, ()):
                self._device.wait(arriving)

    def join(self, request: RequestId) -> None:
        """Return when nothing is written to the request's blocks any more: they may be freed, and
        it is no prompt that has begun."""
        self._prompts.pop(request, None)
        for arriving in self._arriving.pop(request, ()):
            arriving.join()

    def swap_out(self, request: Request, host_offsets: Sequence[int]) -> Transfer:
        """See `Engine.swap_out`; for a request whose computed tokens have all their blocks."""
        name = request.request_id
        self.wait_for([name])
        places = self._places(host_offsets, len(self._scheduler.held_blocks(name)))
        leaving = self._scheduler.take_blocks(name)
        blocks = [block.block_id for block in leaving]
        self._states.take_blocks(name)
        return self._swapper.start(
            TransferKind.KV_OUT,
            self.region.owner,
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
            reads=[(self._model, block) for block in blocks],
            writes=places,
            then=lambda transfer: self._scheduler.give_blocks(leaving),
        )

    def swap_in(self, request: Request, host_offsets: Sequence[int], kv_slabs: int) -> Transfer:
        """See `Engine.swap_in`; for a request that has no blocks, all of whose tokens but the last
        were computed."""
        name, computed = request.request_id, request.num_tokens - 1
        places = self._places(host_offsets, self.shape.blocks(computed))
        cached = self._hold(request, computed, kv_slabs, None)
        shared = {block.block_id for block in self._scheduler.held_blocks(name)}
        tables = self._scheduler.fill(request, computed, computed)
        self._scheduler.filled(request, computed)
        request.num_computed_tokens = computed
        self._states.place(name, tables)
        moved = [
            (block.block_id, place)
            for block, place in zip(self._scheduler.held_blocks(name), places, strict=True)
            if block.block_id not in shared
        ]
        # Cached blocks may be still on their way in, for others.
        others = self._under_way() if cached else []
        transfer = self._swapper.start(
            TransferKind.KV_IN,
            self.region.owner,
            [
                Copy(
                    self._block_address(block),
                    place,
                    self._geometry.layer_block_bytes,
                    rows=self._geometry.layers,
                    destination_pitch=self._geometry.layer_bytes,
                    source_pitch=self._geometry.layer_block_bytes,
                )
                for block, place in moved
            ],
            nbytes=len(moved) * self._geometry.block_bytes,
            reads=[place for _, place in moved],
            writes=[(self._model, block) for block, _ in moved],
        )
        self._arriving[name] = [*others, transfer]
        return transfer

    def _block_address(self, block: int) -> int:
        """Of its part in the first layer; that of the next lies ``layer_bytes`` behind."""
        return self.addresses.start + block * self._geometry.layer_block_bytes

    def _places(self, host_offsets: Sequence[int], blocks: int) -> list[int]:
        """Addresses of the first `blocks` places in the host tier; its layers lie side by side."""
        if len(host_offsets) < blocks:
            raise ValueError(f"{blocks} blocks in {len(host_offsets)} places")
        size = self._geometry.block_bytes
        return [self._host.address(offset, size) for offset in host_offsets[:blocks]]

    def _under_way(self) -> list[Transfer]:
        """All swaps inwards that are not over."""
        return [t for arriving in self._arriving.values() for t in arriving if not t.done]
