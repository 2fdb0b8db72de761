"""Tests for policies, for their authors: `check` tests one, `questions` are some to try it on."""

from appliance.testing.kit import ConformanceFinding, ConformanceReport, HookReport, check
from appliance.testing.recorded_calls import questions
from appliance.testing.scenes import HookCall

__all__ = [
    "ConformanceFinding",
    "ConformanceReport",
    "HookCall",
    "HookReport",
    "check",
    "questions",
]
