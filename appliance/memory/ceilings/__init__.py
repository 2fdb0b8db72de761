"""What a machine can do at best: copies, mapping, page-locking and reading, measured and stored."""
