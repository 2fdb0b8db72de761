"""All that is said of the policies of a daemon, and of its autopilot, in one answer."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.service.autopilot import AutopilotReport
from appliance.service.policy_report import (
    InstalledPolicy,
    PolicyChoice,
    PolicyHappening,
    PolicyState,
)
from appliance.vocabulary import Word


class PolicyReport(Word, frozen=True):
    """The body of ``GET /api/policies``."""

    installed: tuple[InstalledPolicy, ...]
    active: PolicyChoice
    decisions: Mapping[str, tuple[str, ...]]
    """Who is asked, in order, by decision. Only those that make it are named."""
    policies: tuple[PolicyState, ...]
    previous: tuple[PolicyChoice, ...]
    """What was active before, the newest last."""
    events: tuple[PolicyHappening, ...]
    """The newest last."""
    autopilot: AutopilotReport
    """What found, proposed or applied other policies."""
