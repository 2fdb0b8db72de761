"""The relay's planner: which path takes the next piece of a copy from the host to a GPU.

    own link:   host --------------------> target
    by a peer:  host --> buffer of a peer --> target     (PCIe, then NVLink)

Sans-IO: it gives out hops, and hears when they are over. It knows no clock. In this version only
the lab carries hops out (`appliance.lab.sim.relay`); no worker does.

- A peer takes a piece only if the piece then surely arrives before the target's own link could
  bring it: the peer's time is the most that it can take, the own link's the least. So a copy is not
  longer than without peers, while those have no transfers of their own.
- A peer has `STAGING_BUFFERS`, pulls one piece after the other, and sends one after the other. It
  takes no piece while it has a transfer of its own, nor while a switch on the way has no room for
  one more link at its full rate. A transfer that begins there later shares the link with the pieces
  that are under way, at most one for each buffer.
- Pieces are given out in the order of their bytes. Of one copy at most `OWN_PIECES`, and
  `STAGING_BUFFERS` for each peer, are under way at a time; so far bytes arrive out of order.
- Copies that began first are asked first. A peer's buffers hold pieces for one target at a time.

Of n copies that are not over and p peers of a GPU, giving out a piece takes O(n · p), a report
O(n + p).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from appliance.vocabulary import Direction

PIECE_BYTES: Final = 16 << 20
"""As large as the pieces of a GPU's copies are without a relay."""

STAGING_BUFFERS: Final = 2
"""Of each peer, for a piece each: one is pulled while the other is sent."""

OWN_PIECES: Final = 4
"""In line at the target's own link, which is never without one while pieces are left. A second
buffer of a peer pays only if the own link has this much to do."""

_ROUNDING: Final = 1 + 1e-9


class Step(StrEnum):
    """A part of a piece's way."""

    OWN = "own"
    """From the host to the target, over its own link."""
    PULL = "pull"
    """From the host into a buffer of the peer, over the peer's link."""
    SEND = "send"
    """From that buffer to the target, over NVLink."""


class Copy:
    """A copy of `nbytes` bytes from the host to the GPU `target`."""

    __slots__ = ("cancelled", "landed_bytes", "nbytes", "planned_bytes", "target", "under_way")

    def __init__(self, target: int, nbytes: int) -> None:
        self.target = target
        self.nbytes = nbytes
        self.planned_bytes = 0
        """Given out, from the first on."""
        self.landed_bytes = 0
        """At the target, not necessarily the first ones."""
        self.under_way = 0
        """Pieces."""
        self.cancelled = False

    @property
    def over(self) -> bool:
        """Whether no piece is under way, and none will be."""
        return not self.under_way and not self.left_bytes

    @property
    def left_bytes(self) -> int:
        """Not given out yet."""
        return 0 if self.cancelled else self.nbytes - self.planned_bytes


class Piece:
    """Bytes from `offset` of a copy; by the own link of the target if `peer` is None."""

    __slots__ = ("copy", "nbytes", "offset", "peer")

    def __init__(self, copy: Copy, offset: int, nbytes: int, peer: int | None) -> None:
        self.copy = copy
        self.offset = offset
        self.nbytes = nbytes
        self.peer = peer


class Hop(NamedTuple):
    """An order: begin with this step of the piece. Hops of the same link go one after the other."""

    step: Step
    piece: Piece


class Switch:
    """What links share: a root of the PCIe tree, or the host's memory."""

    def __init__(self, bytes_per_second: float, links: Iterable[tuple[int, Direction]]) -> None:
        """`links` are GPUs, each in a direction: ``in`` to the GPU, or ``out`` of it."""
        self.bytes_per_second = bytes_per_second
        self.links = frozenset(links)
        self.used = 0
        """Links that are in use."""


class _Gpu:
    """What one GPU does for its own copies, and for those of others."""

    __slots__ = ("arriving_bytes", "copies", "line", "own_transfers", "pulls", "sending", "staged")

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        """To it, those that are not over."""
        self.line: deque[Piece] = deque()
        """Under way over its own link, for itself."""
        self.arriving_bytes = 0
        """Under way to it through peers."""
        self.own_transfers = 0
        """Inwards, besides the copies."""
        self.pulls: deque[Piece] = deque()
        """For others."""
        self.staged: deque[Piece] = deque()
        self.sending: Piece | None = None

    @property
    def buffered(self) -> list[Piece]:
        """What its staging buffers are taken by."""
        sending = [] if self.sending is None else [self.sending]
        return [*self.pulls, *self.staged, *sending]


class RelayPlanner:
    """Plans all copies of a box. Not thread-safe: one thread tells it everything.

    `peers` has the GPUs that each GPU reaches over NVLink; one that is not there has none.
    """

    def __init__(
        self,
        *,
        bytes_per_second: float,
        nvlink_bytes_per_second: float,
        peers: Mapping[int, Sequence[int]],
        switches: Iterable[Switch] = (),
    ) -> None:
        """The rates are of each GPU: of its PCIe link if no other is in use, and of all that it
        receives over NVLink, or sends."""
        self._rate = bytes_per_second
        self._nvlink_rate = nvlink_bytes_per_second
        self._peers = peers
        self._gpus: dict[int, _Gpu] = {}
        self._copies: list[Copy] = []
        """Those that are not over, in the order in which they began."""
        self._uses: Counter[tuple[int, Direction]] = Counter()
        self._switches: dict[tuple[int, Direction], list[Switch]] = {}
        for switch in switches:
            for link in switch.links:
                self._switches.setdefault(link, []).append(switch)

    # --- what the caller reports -----------------------------------------------------------------

    def begin(self, target: int, nbytes: int) -> Copy:
        """A copy is wanted; those to the same GPU are given out one after the other.

        Raises `ValueError` for a copy of nothing.
        """
        if nbytes < 1:
            raise ValueError(f"a copy of {nbytes} bytes: give at least 1")
        copy = Copy(target, nbytes)
        self._copies.append(copy)
        self._gpu(target).copies.append(copy)
        self._use(target, Direction.IN)
        return copy

    def cancel(self, copy: Copy) -> None:
        """Give out no more of a copy; its target is free once the pieces under way have landed."""
        copy.cancelled = True
        self._drop_if_over(copy)

    def occupy(self, gpu: int, direction: Direction) -> None:
        """A transfer that is not planned here is in line at a GPU's own link."""
        self._gpu(gpu).own_transfers += direction is Direction.IN
        self._use(gpu, direction)

    def vacate(self, gpu: int, direction: Direction) -> None:
        """It is over, or cancelled."""
        self._gpu(gpu).own_transfers -= direction is Direction.IN
        self._leave(gpu, direction)

    def pulled(self, piece: Piece) -> None:
        """A piece lies in its peer's buffer."""
        assert piece.peer is not None, "only a peer pulls"
        peer = self._gpu(piece.peer)
        peer.pulls.remove(piece)
        peer.staged.append(piece)
        self._leave(piece.peer, Direction.IN)

    def landed(self, piece: Piece) -> None:
        """A piece is at its target."""
        copy = piece.copy
        target = self._gpu(copy.target)
        if piece.peer is None:
            target.line.remove(piece)
        else:
            self._gpu(piece.peer).sending = None
            target.arriving_bytes -= piece.nbytes
        copy.landed_bytes += piece.nbytes
        copy.under_way -= 1
        self._drop_if_over(copy)

    # --- what it orders --------------------------------------------------------------------------

    def next_hops(self) -> list[Hop]:
        """All that can begin now, in order; ask after every report."""
        hops = []
        for gpu in self._gpus.values():
            if gpu.staged and gpu.sending is None:
                gpu.sending = gpu.staged.popleft()
                hops.append(Hop(Step.SEND, gpu.sending))
        while (hop := self._next_piece()) is not None:
            hops.append(hop)
        return hops

    def _next_piece(self) -> Hop | None:
        """Copies that began first are asked first; of those to one target, the first with bytes."""
        asked = set()
        for copy in self._copies:
            if not copy.left_bytes or copy.target in asked:
                continue
            asked.add(copy.target)
            nbytes = min(PIECE_BYTES, copy.left_bytes)
            target = self._gpu(copy.target)
            # Pieces of two copies would meet on NVLink, and those of the second delay the first.
            peer = self._faster_peer(copy.target, nbytes) if target.copies[0] is copy else None
            if peer is not None or len(target.line) < OWN_PIECES:
                return self._give_out(copy, nbytes, peer)
        return None

    def _give_out(self, copy: Copy, nbytes: int, peer: int | None) -> Hop:
        piece = Piece(copy, copy.planned_bytes, nbytes, peer)
        copy.planned_bytes += nbytes
        copy.under_way += 1
        target = self._gpu(copy.target)
        if peer is None:
            target.line.append(piece)
            return Hop(Step.OWN, piece)
        target.arriving_bytes += nbytes
        self._gpu(peer).pulls.append(piece)
        self._use(peer, Direction.IN)
        return Hop(Step.PULL, piece)

    def _faster_peer(self, target: int, nbytes: int) -> int | None:
        """The peer by which the next piece arrives first, if it surely beats the own link."""
        line = self._gpu(target).line
        # The first in line may be all but over.
        own_bytes = sum(piece.nbytes for piece in line) - (line[0].nbytes if line else 0)
        best, least = None, (own_bytes + nbytes) / self._rate
        for peer in self._peers.get(target, ()):
            if self._is_free(peer, target):
                seconds = self._most_seconds(peer, target, nbytes)
                if seconds < least:
                    best, least = peer, seconds
        return best

    def _most_seconds(self, peer: int, target: int, nbytes: int) -> float:
        """Until a piece has come by a peer: all that is ahead of it goes before, to the last."""
        pulls = sum(piece.nbytes for piece in self._gpu(peer).pulls)
        arriving = self._gpu(target).arriving_bytes
        return (pulls + nbytes) / self._rate + (arriving + nbytes) / self._nvlink_rate

    def _is_free(self, number: int, target: int) -> bool:
        """Whether a GPU may pull a piece for this one."""
        gpu, link = self._gpu(number), (number, Direction.IN)
        if gpu.own_transfers or gpu.copies or len(gpu.buffered) >= STAGING_BUFFERS:
            return False
        if any(piece.copy.target != target for piece in gpu.buffered):
            return False
        more = 0 if self._uses[link] else 1
        return all(
            (switch.used + more) * self._rate <= switch.bytes_per_second * _ROUNDING
            for switch in self._switches.get(link, ())
        )

    # --- books -----------------------------------------------------------------------------------

    def _gpu(self, number: int) -> _Gpu:
        return self._gpus.setdefault(number, _Gpu())

    def _drop_if_over(self, copy: Copy) -> None:
        copies = self._gpu(copy.target).copies
        if copy.over and copy in copies:
            copies.remove(copy)
            self._copies.remove(copy)
            self._leave(copy.target, Direction.IN)

    def _use(self, gpu: int, direction: Direction) -> None:
        link = (gpu, direction)
        self._uses[link] += 1
        if self._uses[link] == 1:
            for switch in self._switches.get(link, ()):
                switch.used += 1

    def _leave(self, gpu: int, direction: Direction) -> None:
        link = (gpu, direction)
        self._uses[link] -= 1
        if not self._uses[link]:
            for switch in self._switches.get(link, ()):
                switch.used -= 1
