"""Classes for types of configurations that transformers does not know, and would otherwise need
code of the checkpoint for."""
