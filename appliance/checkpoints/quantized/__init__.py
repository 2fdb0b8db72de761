"""Checkpoints with quantized weights: what each kind holds, and what is refused."""
