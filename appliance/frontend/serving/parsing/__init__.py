"""What is changed of vLLM's parsers of tool calls and reasoning."""
