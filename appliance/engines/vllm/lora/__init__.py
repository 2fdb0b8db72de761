"""LoRA adapters in vLLM: their places among the weights, and the products of a batch with them."""
