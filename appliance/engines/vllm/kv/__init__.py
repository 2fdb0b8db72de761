"""KV of one engine: where it lies, and the blocks and copies of its requests."""
