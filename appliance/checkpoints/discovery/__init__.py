"""Finding checkpoints in directories, and naming them."""
