"""Journals of real daemons as workloads."""
