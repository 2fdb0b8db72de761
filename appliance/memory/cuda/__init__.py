"""The memory of GPUs, through the CUDA driver."""
