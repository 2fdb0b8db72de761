"""Memory mechanisms: physical slabs, address ranges, the host tier. No torch, no vllm."""
