"""The front-end process: turns HTTP into token ids and back, with vLLM's own front half."""
