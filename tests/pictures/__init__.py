"""The pictures of README.md: what is in `docs/images`, made of committed data alone."""
