"""A driver that stands for one GPU and computes nothing, for ``make gpu-dry``."""
