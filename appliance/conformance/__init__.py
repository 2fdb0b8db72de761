"""Tests for policies, for their authors: `check` tests one, `questions` are some to try it on."""

from appliance.conformance.kit import Finding, HookReport, Report, check
from appliance.conformance.recorded_calls import questions
from appliance.conformance.scenes import Question

__all__ = ["Finding", "HookReport", "Question", "Report", "check", "questions"]
