"""Memory of one node first, for this process and what it starts: the `set_mempolicy` system call, without libnuma.

The policy is *preferred*, not *bound*: when the node is full, memory comes from another one, where binding would have
the kernel end the process. Linux on x86-64 and Arm; elsewhere, and where a container forbids the call, a reason is
returned and nothing changes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237}  # asm/unistd.h
_MPOL_PREFERRED = 1  # linux/mempolicy.h
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_MAX_NODES = 1024
"""Bits of the masks handed to the kernel; its own limit (MAX_NUMNODES) on x86-64."""


def prefer_node(node: int) -> str | None:
    """Memory that this thread, and threads and processes it starts, touch from now on comes from `node` if it can.

    Returns None, or why the kernel refused.
    """
    assert 0 <= node < _MAX_NODES, node
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        return f"no memory policies on {sys.platform} {platform.machine()}"
    mask = (ctypes.c_ulong * (_MAX_NODES // _WORD_BITS))()
    mask[node // _WORD_BITS] = 1 << (node % _WORD_BITS)
    # the kernel reads one bit less than it is told
    if _libc().syscall(number, _MPOL_PREFERRED, mask, ctypes.c_ulong(_MAX_NODES + 1)) == 0:
        return None
    return _reason(ctypes.get_errno())


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _reason(number: int) -> str:
    if number == errno.EPERM:
        return "set_mempolicy is forbidden here (a container's seccomp profile; it needs CAP_SYS_NICE there)"
    if number == errno.ENOSYS:
        return "this kernel has no memory policies"
    return f"set_mempolicy failed: {os.strerror(number)}"
