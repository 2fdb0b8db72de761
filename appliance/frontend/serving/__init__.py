"""vLLM's serving classes on our core, and what is changed around them."""
