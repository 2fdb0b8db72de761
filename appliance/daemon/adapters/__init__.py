"""LoRA adapters that come to models, and leave them, while these serve."""
