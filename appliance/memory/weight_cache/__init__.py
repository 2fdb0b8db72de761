"""Weights on the host, ready to be copied: images, their files, and who writes them."""
