"""Tests of engines of vLLM's CUDA build, in the process of one worker; see docs/gpu.md."""
