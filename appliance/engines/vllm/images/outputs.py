"""`EncoderOutputs`: what the encoder made of images, in blocks of the model's KV pool.

A request that begins takes blocks for each image that it has to compute, next to those of its KV.
An output is written there behind the step that made it, and read before each later step that needs
it. Once no request does, its blocks are cold, as those of the prefix cache are: another request
with the image finds it, until the memory is wanted. Cold blocks are lost in the order in which
they became cold, whatever is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from appliance.engines.vllm.scheduler import ElasticBlockPool
from appliance.vocabulary import KvShape, RequestId


@dataclass(slots=True)
class _Output:
    """Of one image."""

    blocks: list[int]
    users: set[RequestId] = field(default_factory=set)
    like: torch.Tensor | None = None
    """Without data: what is in the blocks; None until it was made."""


class EncoderOutputs:
    """Of one model's images, by the names that prompts know them by."""

    def __init__(self, blocks: ElasticBlockPool, shape: KvShape) -> None:
        self._pool = blocks.kv
        self._memory = blocks.kv_bytes  # [layers, blocks, bytes]
        self._shape = shape
        self._outputs: dict[str, _Output] = {}
        self._in_block: dict[int, str] = {}
        self._of: dict[RequestId, set[str]] = {}
        blocks.on_lost = self._lose

    @property
    def bytes(self) -> int:
        """Of the blocks that they have."""
        return len(self._in_block) * self._shape.block_bytes

    @property
    def any_held(self) -> bool:
        """Whether requests have any."""
        return bool(self._of)

    def hold(
        self, request: RequestId, images: Mapping[str, int], provide: Callable[[int], None]
    ) -> None:
        """Have blocks for a request's images of so many tokens. `provide` makes as many free as it
        is asked for; what it raises is raised with nothing held."""
        names = self._of[request] = set(images)
        for name in names & self._outputs.keys():
            output = self._outputs[name]
            if not output.users:  # first, because what is provided must not be taken from it
                for block in output.blocks:
                    self._pool.revive(block)
            output.users.add(request)
        lacking = {
            name: self._shape.image_blocks(tokens)
            for name, tokens in images.items()
            if name not in self._outputs
        }
        try:
            provide(sum(lacking.values()))
        except BaseException:
            self.keep(request, ())
            raise
        for name, count in lacking.items():
            blocks = self._pool.take(count)
            self._outputs[name] = _Output(blocks, {request})
            self._in_block.update(dict.fromkeys(blocks, name))

    def keep(self, request: RequestId, names: Collection[str]) -> None:
        """A request needs these of its images from now on, and no others."""
        held = self._of.pop(request, None)
        if held is None:
            return
        if kept := held.intersection(names):
            self._of[request] = kept
        for name in sorted(held - kept):
            output = self._outputs.get(name)
            if output is None:
                continue  # it was to be provided for, in vain
            output.users.discard(request)
            if not output.users:
                made = output.like is not None
                self._pool.give(output.blocks, keep=made)
                if not made:
                    self._forget(name)

    def lacks(self, request: RequestId) -> bool:
        """Whether one of a request's images was not made yet."""
        return any(self._outputs[name].like is None for name in self._of.get(request, ()))

    def write(self, name: str, made: torch.Tensor) -> None:
        """Keep what was made of an image that a request holds. Nothing, if it is there."""
        output = self._outputs[name]
        if output.like is not None:
            return
        rows = self._rows(output)
        data = made.contiguous().view(torch.uint8).flatten()
        assert data.numel() <= rows.numel(), f"{made.shape} of {made.dtype} in {rows.shape} bytes"
        rows.flatten()[: data.numel()] = data
        for row, block in zip(rows, output.blocks, strict=True):  # much faster than by a list
            self._memory[:, block] = row
        output.like = torch.empty_like(made, device="meta")

    def read(self, name: str) -> torch.Tensor | None:
        """A copy of what was made of an image that a request holds; None if it was not yet."""
        output = self._outputs[name]
        like = output.like
        if like is None:
            return None
        rows = self._rows(output)
        for row, block in zip(rows, output.blocks, strict=True):
            row[:] = self._memory[:, block]
        data = rows.flatten()[: like.numel() * like.itemsize]
        return data.view(like.dtype).view(like.shape)

    def _rows(self, output: _Output) -> torch.Tensor:
        """Memory for what is in its blocks, ``[blocks, layers, bytes]``."""
        layers, _, size = self._memory.shape
        shape = len(output.blocks), layers, size
        return torch.empty(shape, dtype=torch.uint8, device=self._memory.device)

    def _lose(self, blocks: Iterable[int]) -> None:
        """Cold blocks lost their content: those that are left of an image are free."""
        gone = set(blocks)
        for name in {self._in_block[block] for block in gone if block in self._in_block}:
            left = [block for block in self._outputs[name].blocks if block not in gone]
            self._forget(name)
            for block in left:
                self._pool.revive(block)
            self._pool.give(left)

    def _forget(self, name: str) -> None:
        for block in self._outputs.pop(name).blocks:
            del self._in_block[block]
