"""The pictures of README.md and of pages: `docs/images`, made of committed data and code alone."""
