"""Tests of ``appliance serve`` on a GPU, or on the pretend driver; see docs/gpu.md."""
