"""What a simulated instance holds of a model: its weights, and its share of the pool for KV."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.lab.hardware import ModelProfile
from appliance.lab.sim.link import Carrier, LinkTransfer
from appliance.vocabulary import KvShape, RequestId


@dataclass(slots=True)
class WeightLoad:
    """Weights on their way."""

    link: Carrier
    lane: str
    transfer: LinkTransfer
    prefetched: bool


@dataclass(slots=True)
class SimulatedEngine:
    """One model: what it holds of the pool."""

    profile: ModelProfile
    shape: KvShape
    weight_slabs: int
    in_host: bool | None = None
    """Whether it loads from the host tier; None before its first load."""
    mapped: bool = False
    load: WeightLoad | None = None
    blocks: dict[RequestId, int] = field(default_factory=dict)
    used: int = 0
    """Blocks of requests."""
    leaving: int = 0
    """Blocks that are being copied out."""
    arriving: int = 0
    """Moves inwards under way."""
    kv_mapped: int = 0
    """Slabs of KV that were mapped when that was last paid for."""

    def slabs(self, more_blocks: int = 0) -> int:
        """Slabs of KV that are mapped, with so many blocks more."""
        return self.shape.slabs(self.used + self.leaving + more_blocks)

    def take_remapped(self) -> int:
        """By how many the slabs of KV have become more or fewer since the last time."""
        mapped = self.slabs()
        changed, self.kv_mapped = abs(mapped - self.kv_mapped), mapped
        return changed

    def hold(self, request: RequestId, blocks: int) -> None:
        self.used += blocks - self.blocks.get(request, 0)
        self.blocks[request] = blocks

    def keep(self, request: RequestId, tokens: int) -> None:
        """Have the request hold the blocks of so many tokens, which are fewer than those of its
        prompt where layers have windows; none for 0."""
        if tokens:
            self.hold(request, self.shape.blocks(tokens))
        else:
            self.drop(request)

    def drop(self, request: RequestId) -> int:
        """The request's blocks are not its own any more; how many there were."""
        blocks = self.blocks.pop(request, 0)
        self.used -= blocks
        return blocks
