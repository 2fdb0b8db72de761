"""Tests for policies, for their authors: `check` tests one, `questions` are some to try it on."""

from appliance.conformance.kit import ConformanceFinding, ConformanceReport, HookReport, check
from appliance.conformance.recorded_calls import questions
from appliance.conformance.scenes import HookCall

__all__ = [
    "ConformanceFinding",
    "ConformanceReport",
    "HookCall",
    "HookReport",
    "check",
    "questions",
]
