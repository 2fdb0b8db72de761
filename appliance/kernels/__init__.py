"""Kernels: CUDA C, compiled where they run, and what each one does in PyTorch's words."""
