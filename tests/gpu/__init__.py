"""Tests that need a real GPU; see docs/gpu.md."""
