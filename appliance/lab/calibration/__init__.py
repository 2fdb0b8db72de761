"""Cost models from measured steps."""
