"""``[fleet]`` of a scenario: the boxes, the routers to compare, and which box has which models."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from appliance.errors import LabError
from appliance.fleet.ranking import ROUTERS
from appliance.lab.fleet.play import FleetSetting
from appliance.units import Seconds

Count = Annotated[int, Meta(ge=1)]


class FleetPlacement(StrEnum):
    """Which boxes have which models in their catalogues."""

    TURN = "turn"
    """`copies` boxes each, in turn."""
    DEMAND = "demand"
    """As `appliance fleet plan` changes that, by the demand of an hour like the run."""


class FleetTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[fleet]``: so many boxes, each with all of ``[hardware]``, behind a router."""

    boxes: Count
    routers: Annotated[tuple[str, ...], Meta(min_length=1)] = tuple(ROUTERS)
    """To compare; all that there are if it is not given."""
    poll: Seconds = Seconds(1.0)
    """So often the router asks each box for its load; what it knows is as old as that."""
    copies: Count | None = None
    """Boxes that have each model in their catalogue; all if it is not given."""
    placement: FleetPlacement = FleetPlacement.TURN
    """Which boxes have which models."""
    sessions: Count = 8
    """Of each model: its requests belong to one of them, each as likely as any other."""

    def setting(self, seed: int) -> FleetSetting:
        """Raises `LabError` for a router that does not exist, or more copies than boxes."""
        for name in self.routers:
            if name not in ROUTERS:
                raise LabError(f"fleet.routers: no {name}; there are: {', '.join(ROUTERS)}")
        copies = self.boxes if self.copies is None else self.copies
        if copies > self.boxes:
            raise LabError(f"fleet.copies: {copies} copies on {self.boxes} boxes")
        return FleetSetting(
            boxes=self.boxes,
            poll_seconds=float(self.poll),
            copies=copies,
            sessions=self.sessions,
            seed=seed,
        )
