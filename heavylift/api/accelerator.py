"""`get_accelerator()`: the device by the methods that scripts written for DeepSpeed call. CUDA where there is one.

Everything is torch's. Left out: op builders and graph capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch


class Accelerator:
    """One device type: `cuda` or `cpu`."""

    def __init__(self, device_type: str) -> None:
        self._name = device_type
        self._is_cuda = device_type == "cuda"
        self._module: Any = torch.cuda if self._is_cuda else torch.cpu
        self._communication_backend_name = "nccl" if self._is_cuda else "gloo"

    # ---- the device -----------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """`cuda:1` or `cuda`; `cpu` always."""
        return self._name if device_index is None or not self._is_cuda else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which the device is current."""
        return torch.cuda.device(device_index) if self._is_cuda else nullcontext()

    def set_device(self, device_index: int) -> None:
        """Makes it the process's device."""
        if self._is_cuda:
            torch.cuda.set_device(device_index)

    def current_device(self) -> Any:
        """Its index; `cpu` on the CPU."""
        return torch.cuda.current_device() if self._is_cuda else "cpu"

    def current_device_name(self) -> str:
        """`cuda:0`, or `cpu`."""
        return f"cuda:{torch.cuda.current_device()}" if self._is_cuda else "cpu"

    def device_count(self) -> int:
        """How many devices this process sees; on the CPU 1."""
        return torch.cuda.device_count() if self._is_cuda else 1

    def is_available(self) -> bool:
        """Always: there is a CPU."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether operations are done when they return."""
        return not self._is_cuda

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """`nccl` or `gloo`."""
        return self._communication_backend_name

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on this kind of device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Page-locked where there is a GPU."""
        return tensor.pin_memory() if self._is_cuda else tensor

    # ---- random numbers -------------------------------------------------------------------------------------------

    def random(self) -> Any:
        """torch.random."""
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        """Seeds the current device."""
        return torch.cuda.manual_seed(seed) if self._is_cuda else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Seeds all devices."""
        return torch.cuda.manual_seed_all(seed) if self._is_cuda else torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """Of the current device."""
        return torch.cuda.initial_seed() if self._is_cuda else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Of the device's generator."""
        if not self._is_cuda:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Of the device's generator."""
        if self._is_cuda:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    # ---- streams --------------------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """The class of streams; None on the CPU."""
        return torch.cuda.Stream if self._is_cuda else None

    @property
    def Event(self) -> Any:
        """The class of events; None on the CPU."""
        return torch.cuda.Event if self._is_cuda else None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which it is current."""
        return torch.cuda.stream(stream) if self._is_cuda and stream is not None else nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        """None on the CPU."""
        return torch.cuda.current_stream(device_index) if self._is_cuda else None

    def default_stream(self, device_index: int | None = None) -> Any:
        """None on the CPU."""
        return torch.cuda.default_stream(device_index) if self._is_cuda else None

    # ---- memory, bytes --------------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Gives the allocator's free blocks back."""
        if self._is_cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """By tensors on the device; the process's resident memory on the CPU."""
        return torch.cuda.memory_allocated(device_index) if self._is_cuda else psutil.Process().memory_info().rss

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The peak of it; on the CPU as `memory_allocated`."""
        return torch.cuda.max_memory_allocated(device_index) if self._is_cuda else self.memory_allocated()

    def memory_reserved(self, device_index: int | None = None) -> int:
        """By the allocator."""
        return torch.cuda.memory_reserved(device_index) if self._is_cuda else self.memory_allocated()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The peak of it."""
        return torch.cuda.max_memory_reserved(device_index) if self._is_cuda else self.memory_allocated()

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Peaks start anew; no effect on the CPU."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """The allocator's statistics; empty on the CPU."""
        return torch.cuda.memory_stats(device_index) if self._is_cuda else {}

    def total_memory(self, device_index: int | None = None) -> int:
        """Of the device, or of the machine."""
        if not self._is_cuda:
            return psutil.virtual_memory().total
        return torch.cuda.get_device_properties(
            self.current_device() if device_index is None else device_index
        ).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        """Free on the device, or on the machine."""
        return torch.cuda.mem_get_info(device_index)[0] if self._is_cuda else psutil.virtual_memory().available

    # ---- what it can do -------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """Whether bfloat16 training is."""
        return torch.cuda.is_bf16_supported() if self._is_cuda else True

    def is_fp16_supported(self) -> bool:
        """Whether float16 training is."""
        return True

    def is_triton_supported(self) -> bool:
        """Whether Triton kernels run: on CUDA."""
        return self._is_cuda

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that models may have."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def range_push(self, msg: str, *_: Any, **__: Any) -> None:
        """A range in a profile."""
        if self._is_cuda:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, *_: Any, **__: Any) -> None:
        """The end of the youngest range."""
        if self._is_cuda:
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls it, on CUDA when CUDA is in use."""
        return torch.cuda._lazy_call(callback) if self._is_cuda else callback()


@functools.cache
def get_accelerator() -> Accelerator:
    """CUDA where it is available, else the CPU."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


def is_current_accelerator_supported() -> bool:
    """Always."""
    return True
