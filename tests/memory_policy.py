"""The kernel's own word on the memory policy of this thread: the `get_mempolicy` system call, without libnuma."""

from __future__ import annotations

import ctypes
import platform

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236, "riscv64": 236}  # asm/unistd.h
_MPOL_PREFERRED = 1  # linux/mempolicy.h
_MAX_NODES = 1024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def preferred_node() -> int | None:
    """The node that memory comes from first; None with any other policy, or where it cannot be asked."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return None
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_MAX_NODES // _WORD_BITS))()
    size, none = ctypes.c_ulong(_MAX_NODES), ctypes.c_ulong(0)
    if ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, size, None, none) != 0:
        return None
    nodes = [bit for bit in range(_MAX_NODES) if mask[bit // _WORD_BITS] >> (bit % _WORD_BITS) & 1]
    return nodes[0] if mode.value == _MPOL_PREFERRED and len(nodes) == 1 else None
