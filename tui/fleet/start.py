"""Starts the dashboard of a fleet in this terminal, and from there those of its boxes."""

from __future__ import annotations

import asyncio

from tui.app import Dashboard
from tui.connection import DaemonConnection
from tui.fleet.app import FleetDashboard
from tui.fleet.source import FleetSource, Watch


def run(
    watch: Watch, *, key: str | None = None, readonly: bool = False, theme: str = "dark"
) -> None:
    """Returns when it is left. A box's own dashboard leads back to it when that is left."""
    asyncio.run(_run(watch, key, readonly, theme))


async def _run(watch: Watch, key: str | None, readonly: bool, theme: str, at: str = "") -> None:
    """The cursor is on the box `at` first."""
    source = FleetSource(watch)
    while True:
        fleet = FleetDashboard(source, readonly=readonly, theme=theme, at=at)
        await fleet.run_async()
        if fleet.opened is None:
            return
        theme, at = fleet.theme, fleet.opened["box"]
        connection = DaemonConnection(fleet.opened["url"], key)
        try:
            box = Dashboard(connection, readonly=readonly, theme=theme)
            await box.run_async()
            theme = box.theme
        finally:
            await connection.close()
