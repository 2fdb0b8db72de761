"""Tensors over memory that torch does not own."""

from __future__ import annotations

import ctypes

import torch


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """A ``uint8`` tensor of shape ``[nbytes]`` over a host address that the caller keeps mapped."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)
