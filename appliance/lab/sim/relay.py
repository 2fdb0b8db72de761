"""Loads that go through idle peers, too: what the relay's planner orders, on the lab's links.

The planner (`appliance.memory.relay`) says which path takes which piece. A pull is a transfer on
the peer's own link, in a lane of its own; a send is one on the target's NVLink, which passes pieces
in line. So no piece is faster than the links it passes, and those share their rate as always.

A GPU here is an instance: the GPUs of a larger one each relay through one GPU of the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from appliance.lab.sim.event_queue import Agenda
from appliance.lab.sim.link import Link, LinkTransfer
from appliance.memory.relay import Copy, Piece, RelayPlanner, Step
from appliance.vocabulary import Direction, InstanceId

OWN_LANE, RELAY_LANE = "weights", "relay"
"""Of a link: an instance's own pieces, and those that it pulls for its peers."""
NVLINK_LANE = "nvlink"


class Relay:
    """Of one box. `links` has the instances' links inwards, `peers` those it may relay through."""

    def __init__(
        self,
        agenda: Agenda,
        planner: RelayPlanner,
        links: Mapping[InstanceId, Link],
        nvlink_bytes_per_second: float,
    ) -> None:
        self._agenda = agenda
        self._planner = planner
        self._links = links
        self._nvlinks = {one: Link(agenda, nvlink_bytes_per_second) for one in links}
        self._transfers: dict[Copy, LinkTransfer] = {}
        self._copies: dict[LinkTransfer, Copy] = {}

    def start(
        self, target: InstanceId, nbytes: int, then: Callable[[LinkTransfer], None]
    ) -> LinkTransfer:
        """Have so many bytes come; `then` is called when all are there."""
        transfer = LinkTransfer(nbytes, self._agenda.now, then)
        copy = self._planner.begin(target, nbytes)
        self._transfers[copy], self._copies[transfer] = transfer, copy
        self._go_on()
        return transfer

    def cancel(self, transfer: LinkTransfer) -> None:
        """Have no more of it come, but for the pieces that are under way; without a notice."""
        copy = self._copies.pop(transfer)
        del self._transfers[copy]
        self._planner.cancel(copy)
        self._go_on()

    def occupy(self, instance: InstanceId, direction: Direction) -> None:
        """A transfer that is not relayed is in line at an instance's own link."""
        self._planner.occupy(instance, direction)

    def vacate(self, instance: InstanceId, direction: Direction) -> None:
        """It is over, or cancelled."""
        self._planner.vacate(instance, direction)
        self._go_on()

    def _go_on(self) -> None:
        for step, piece in self._planner.next_hops():
            target, peer = piece.copy.target, piece.peer
            if step is Step.SEND:
                self._nvlinks[target].start(NVLINK_LANE, piece.nbytes, partial(self._landed, piece))
            elif peer is None:
                self._links[target].start(OWN_LANE, piece.nbytes, partial(self._landed, piece))
            else:
                self._links[peer].start(RELAY_LANE, piece.nbytes, partial(self._pulled, piece))

    def _pulled(self, piece: Piece, hop: LinkTransfer) -> None:
        self._note_beginning(piece, hop)
        self._planner.pulled(piece)
        self._go_on()

    def _landed(self, piece: Piece, hop: LinkTransfer) -> None:
        self._note_beginning(piece, hop)
        self._planner.landed(piece)
        self._go_on()
        if piece.copy.over and (transfer := self._transfers.pop(piece.copy, None)) is not None:
            del self._copies[transfer]
            transfer.ended = self._agenda.now
            transfer.then(transfer)

    def _note_beginning(self, piece: Piece, hop: LinkTransfer) -> None:
        """A load began with the first of its pieces."""
        transfer = self._transfers.get(piece.copy)
        if transfer is not None and hop.began is not None:
            began = hop.began if transfer.began is None else transfer.began
            transfer.began = min(began, hop.began)


class RelayedLink:
    """A link of an instance in one direction: its loads are relayed, and the relay is notified of
    all other transfers."""

    def __init__(
        self, link: Link, relay: Relay, instance: InstanceId, direction: Direction
    ) -> None:
        self._link = link
        self._relay = relay
        self._instance = instance
        self._direction = direction

    def start(self, lane: str, nbytes: int, then: Callable[[LinkTransfer], None]) -> LinkTransfer:
        """Put a transfer in line; `then` is called with it when all of its bytes are there."""
        if lane == OWN_LANE:
            return self._relay.start(self._instance, nbytes, then)
        self._relay.occupy(self._instance, self._direction)

        def end(transfer: LinkTransfer) -> None:
            self._relay.vacate(self._instance, self._direction)
            then(transfer)

        return self._link.start(lane, nbytes, end)

    def cancel(self, lane: str, transfer: LinkTransfer) -> None:
        """Stop a transfer without a notice; pieces of a load that are under way still come."""
        if lane == OWN_LANE:
            self._relay.cancel(transfer)
        else:
            self._link.cancel(lane, transfer)
            self._relay.vacate(self._instance, self._direction)


def peers_on_hosts(
    instances: int, gpus_per_instance: int, gpus_per_host: int
) -> dict[InstanceId, Sequence[InstanceId]]:
    """The other instances on the same host, of each instance that has all its GPUs on one and is
    not alone there."""
    hosts: dict[int, list[InstanceId]] = {}
    for instance in range(instances):
        first = instance * gpus_per_instance // gpus_per_host
        last = ((instance + 1) * gpus_per_instance - 1) // gpus_per_host
        if first == last:
            hosts.setdefault(first, []).append(instance)
    return {
        one: [other for other in host if other != one]
        for host in hosts.values()
        for one in host
        if len(host) > 1
    }
