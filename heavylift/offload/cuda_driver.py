"""What the compiled kernel needs of the CUDA driver to copy while it steps: the addresses of five functions.

It calls them itself, since between two pieces Python would wait for its lock, which backward takes often.
"""

from __future__ import annotations

import functools
from ctypes import CDLL, Structure, c_void_p, cast

import torch


class Driver(Structure):
    """`Driver` of native/pieces.h. Each function returns 0, or what went wrong."""

    _fields_ = [(name, c_void_p) for name in ("copy_down", "copy_up", "record", "query", "wait")]


@functools.cache
def cuda_driver() -> Driver | None:
    """The CUDA driver's functions; None where there is no such driver.

    They work in the context that is current on the calling thread, and copy page-locked memory without waiting.
    """
    if torch.version.hip is not None:
        return None  # the streams are not that driver's
    try:
        library = CDLL("libcuda.so.1")
        functions = (
            library.cuMemcpyDtoHAsync_v2,
            library.cuMemcpyHtoDAsync_v2,
            library.cuEventRecord,
            library.cuEventQuery,
            library.cuStreamWaitEvent,
        )
    except (OSError, AttributeError):
        return None
    return Driver(*(cast(function, c_void_p).value for function in functions))
