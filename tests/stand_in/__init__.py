"""A driver library that stands in for NVIDIA's where there is no GPU; see `driver`."""
