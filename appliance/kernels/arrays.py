"""Tensors over addresses of a GPU: CuPy names the memory, DLPack hands it on."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack


def device_bytes(address: int, nbytes: int, device: int = 0) -> torch.Tensor:
    """The bytes at an address as a uint8 tensor, without a copy.

    Nothing has to be mapped there yet, and this does not keep it mapped: as with any view of a
    reserved range, the caller may use it only while there are slabs behind it.
    """
    cupy: Any = importlib.import_module("cupy")
    with cupy.cuda.Device(device):
        # With the device named, CuPy does not ask the driver whose the address is.
        memory = cupy.cuda.UnownedMemory(address, nbytes, owner=None, device_id=device)
        array = cupy.ndarray((nbytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        tensor: torch.Tensor = from_dlpack(array)
    return tensor
