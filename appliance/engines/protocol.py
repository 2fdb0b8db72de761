"""What a worker asks of an engine: the seam in front of vLLM, or of another executor.

Owners of memory: a worker has one `appliance.memory.arena.Arena` (the device pool of its instance)
and one `appliance.memory.host_tier.HostTier` (the box's shared host memory). An engine reserves
address ranges in the arena once, when it is built, and from then on only maps, unmaps and copies.

An engine is driven from one thread. What it copies goes on in other threads (or streams), as a
`Transfer`; an engine waits by itself for what a step needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

import msgspec

from appliance.checkpoints.adapters import AdapterPlace
from appliance.memory.transfers import Transfer
from appliance.vocabulary import FinishReason, KvShape, ModelName, RequestId


class GuideRefused(ValueError):
    """A guide that cannot be followed; the message says why."""


NO_TOKEN: Final = -1
"""The token of a pooled prompt, whose outcome is all in the detail."""


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine needs to start or to continue a request.

    `output` holds the tokens already produced (and sent) elsewhere: by another instance, or by
    this one before its worker was lost. Penalties, the seeded generator and the guide resume behind
    them.

    `body` is the rest: how tokens are drawn, or the prompt is pooled. It is the front end's request
    without its prompt, as `appliance.engines.vllm.messages` encodes it; engines alone read it.

    The prefix cache serves a sequence with what sequences of the same `prefix_salt` (without a
    colon) left there, and of the same `cache_salt` in the body.

    `images` are the tokens of each image or sound in the prompt: what room is made for. The images
    themselves are in the body.
    """

    request: RequestId
    model: ModelName
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    body: bytes
    prefix_salt: str = ""
    images: tuple[int, ...] = ()


class Produced(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token of one request; a step may give several, of which the last may end it.

    `detail` is the engine's whole output where that is more than the token (log probabilities, a
    stop reason, cached tokens): `appliance.engines.vllm.messages`'s encoding of it. Of a prompt
    that was pooled it holds the one and only outcome, and the token is `NO_TOKEN`.
    """

    request: RequestId
    token: int
    finished: FinishReason | None = None
    detail: bytes | None = None
    cached: int = 0
    """With the first output: tokens of the prompt that the prefix cache had."""

    @property
    def tokens(self) -> int:
        """Tokens that this is: one, or none."""
        return 0 if self.token == NO_TOKEN else 1


class KvUse(NamedTuple):
    """KV slabs that a model has mapped, and how many of them hold only cold prefix cache."""

    slabs: int
    cold_slabs: int


class KvBytes(NamedTuple):
    """KV memory of a tier: what is taken in whole slabs, what of it used blocks and cold ones
    (prefix cache) fill, the most that was ever taken, and what of the used and cold blocks holds
    images as the encoder left them."""

    mapped_bytes: int
    used_bytes: int
    cold_bytes: int
    peak_bytes: int
    image_bytes: int = 0


class DraftUse(NamedTuple):
    """Tokens that were drafted, and those of them that became output."""

    drafted: int
    accepted: int


class Verdict(StrEnum):
    """What comparing the weights on a device with their master image says."""

    OK = "ok"
    DIFFERS = "differs"
    DAMAGED = "image damaged"
    """The master image itself is not what was encoded; the worker's log names its blocks."""
    NOT_LOADED = "not loaded"
    NO_IMAGE = "no image"


class KvExhausted(Exception):
    """The step needs more KV than the slabs allowed; nothing was computed, nothing changed."""


class Engine(Protocol):
    """One model on one instance. All sizes in bytes or slabs, as named."""

    model: ModelName
    weight_slabs: int
    """Slabs of each device that the weights need."""
    host_slabs: int
    """Slabs of the host tier that a master image is written to, for all ranks."""
    layout_digest: str
    """Identifies the layout of the master image; equal on all instances that may share one."""
    kv: KvShape

    def store_weights(self, host_offsets: Sequence[int], *, fill: bool) -> int:
        """Adopt the master image at these host slabs; if `fill`, write it there first, straight
        from the checkpoint's files. Without slabs there is no image: every load reads the files.
        Returns how many of the slabs, from the first on, it takes: fewer once it was encoded.

        May be called again, with other slabs, while the weights are not on the device. Raises
        `CheckpointError` if the files are not what they were when the engine was built.
        """

    def begin_load(self) -> Transfer:
        """Map slabs under the weights and start to copy them in, in the order of the layers.

        Returns the transfer under way, or the last one, if they are in place or on their way.
        `prefill` and `step` wait by themselves, layer by layer. Raises `PoolExhausted` with
        nothing mapped; a transfer from a checkpoint's files may fail with `CheckpointError`.
        """

    def put_adapters(
        self, adapters: Sequence[AdapterPlace], slots: Sequence[int], *, image: bool
    ) -> None:
        """Have these LoRA adapters from now on. The places `slots`, which no request may use, are
        written anew wherever the weights are: on the device, once a load under way is over, and if
        `image`, in the master image, which has to be held. A place without an adapter is zero.

        Raises `CheckpointError` if an adapter cannot be read, or the model has no room for others;
        no request may ask for one of these places then.
        """

    def evict_weights(self) -> None:
        """Unmap the weights, and stop a load that is under way; idempotent."""

    def prepare(self, body: bytes) -> None:
        """Compile the guide of a request's body, so that `add` finds it compiled. Raises
        `GuideRefused`.

        Unlike everything else this is called from a thread of its own, while the engine computes.
        """

    def add(self, sequence: SequenceSpec) -> None:
        """Make a request known. It has no KV yet: `prefill` computes it or `swap_in` brings it.

        A guide that was not prepared is compiled here. Raises `ValueError` (`GuideRefused`) for
        what cannot be computed.
        """

    def knows(self, request: RequestId) -> bool:
        """Whether the request was added, and neither ended nor was forgotten."""

    def forget(self, request: RequestId) -> None:
        """Free everything of a request; unknown ids are fine."""

    def prefill(self, request: RequestId, kv_slabs: int) -> list[Produced]:
        """Compute prompt and output so far, in chunks, and produce one token.

        Raises `KvExhausted` (and keeps nothing of the request's KV) if `kv_slabs` are not enough.
        """

    def begin_prefill(self, request: RequestId, kv_slabs: int) -> None:
        """Take the KV of prompt and output so far, for mixed steps to compute.

        Raises `KvExhausted` (and keeps nothing of the request's KV) if `kv_slabs` are not enough.
        """

    def tokens_left(self, request: RequestId) -> int:
        """Tokens of a prompt that has begun which are not computed yet; the prefix cache had the
        others, or steps have computed them."""

    def step(
        self,
        requests: Sequence[RequestId],
        kv_slabs: int,
        prompts: Sequence[RequestId] = (),
        chunk_tokens: int = 0,
    ) -> list[Produced]:
        """Decode one token of each of these requests, which must have their KV on the device; more,
        in order, where drafts were right. All but a request's last token are computed afterwards.

        Stepping the same list object again is cheapest; it must not be changed meanwhile.

        A mixed step has `prompts` that have begun, too: the next `chunk_tokens` tokens of them (at
        least 1) are computed, in the order given. One that is done by this produces a token, and is
        stepped like any other from then on. Both together are at most ``max_batch`` requests.

        Raises `KvExhausted` before computing anything when the step needs more than `kv_slabs`.
        """

    def swap_out(self, request: RequestId, host_offsets: Sequence[int]) -> Transfer:
        """Start to copy the request's KV blocks to these places of the host tier.

        The request has no blocks any more; they are free once the transfer is over and reaped.
        """

    def swap_in(self, request: RequestId, host_offsets: Sequence[int], kv_slabs: int) -> Transfer:
        """Start to bring KV blocks in from the host tier; `step` waits for those of its batch.

        `KvExhausted` leaves nothing changed.
        """

    def trim(self, keep_slabs: int | None = None) -> KvUse:
        """Give slabs without any block in use or in the prefix cache back to the pool.

        With `keep_slabs`, drop cold prefix cache, too, coldest first, until at most so many slabs
        are mapped or nothing cold is left.
        """

    def kv_use(self) -> KvBytes:
        """The model's KV on the device, O(1); `peak_bytes` since the engine was built."""

    def draft_use(self) -> DraftUse:
        """Since the engine was built."""

    def retire(self) -> None:
        """Give everything back, addresses too; nothing may be under way. The engine is not used
        afterwards."""

    def verify(self) -> Verdict:
        """Compare the weights on the device with the master image, by their 64-bit fingerprints.

        Reads all of both. A load under way counts as not loaded. The image is compared where
        `store_weights` said that it is, even if another model has its slabs since.
        """
