"""Which parsers of vLLM's read the tool calls and the reasoning of a checkpoint's model."""
