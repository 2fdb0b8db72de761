"""What a fleet on Ray Serve is started with, and the names that its nodes agree on. No Ray here."""

from __future__ import annotations

from typing import Final

from appliance.fleet.front import MOST_BODY_BYTES
from appliance.vocabulary import Word

BOX_RESOURCE: Final = "appliance"
"""A node has one of it if there is a box on it."""
FRONT_RESOURCE: Final = "appliance_front"
BOX_NAME: Final = "APPLIANCE_FLEET_BOX_NAME"
BOX_URL: Final = "APPLIANCE_FLEET_BOX_URL"
BOX_KEY: Final = "APPLIANCE_FLEET_BOX_KEY"
"""In the environment of a node: its box, and the key for its load."""
RAY_PORT: Final = 6379


class FleetSettings(Word, frozen=True, kw_only=True):
    """Of the application, for all boxes."""

    policy: str = "residency_prefix"
    """A name in `appliance.fleet.ranking.ROUTERS`."""
    max_queue: int = 1024
    """Requests at one box at once: at least what its own `max_queue` is, so that boxes queue and
    Serve does not."""
    most_body: int = MOST_BODY_BYTES
