"""Configurations of checkpoints that transformers would read with code of the checkpoint."""
