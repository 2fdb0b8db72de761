"""Scenarios, comparisons of policies, sweeps and capacity plans."""
