"""The GPUs that this machine lends: how many, which of them `CUDA_VISIBLE_DEVICES` names, where on the bus.

The driver is asked through ctypes: it answers without torch, makes no context, and counts as torch counts
(`CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` respected, unlike NVML's numbers).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""ROCm builds of torch obey it too."""
_PCI_ID_BYTES = 32


def gpu_pci_ids() -> list[str]:
    """PCI ids (`0000:3b:00.0`) of the visible NVIDIA GPUs in torch's order; empty without GPU or driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    ids = []
    for index in range(count.value):
        device, text = ctypes.c_int(), ctypes.create_string_buffer(_PCI_ID_BYTES)
        if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
            return []
        if driver.cuDeviceGetPCIBusId(text, _PCI_ID_BYTES, device) != 0:
            return []
        ids.append(text.value.decode().lower())
    return ids


def visible_ids(num_gpus: int) -> list[str]:
    """What to write into CUDA_VISIBLE_DEVICES for each of the `num_gpus` visible GPUs, in their order."""
    given = [part.strip() for part in os.environ.get(VISIBLE_VARIABLE, "").split(",") if part.strip()]
    return given[:num_gpus] if len(given) >= num_gpus else [str(index) for index in range(num_gpus)]


def device_list(slots: Sequence[int], num_gpus: int) -> str:
    """CUDA_VISIBLE_DEVICES for ranks on these slots, which count the GPUs visible to the launcher."""
    ids = visible_ids(num_gpus)
    return ",".join(ids[slot] for slot in slots)
