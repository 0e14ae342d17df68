"""Small tensors between the host and the device, so that the program waits for as little as possible.

A copy from ordinary memory blocks the program until the device has come to it, behind everything that has been issued
before: the optimizer's step, or states on their way. A copy from page-locked memory is only put into the queue.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`, copied on the current stream; the program does not wait for it. Itself where it is there
    already.

    PyTorch keeps page-locked blocks for reuse, and keeps this one until the copy is done.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostScalar:
    """One float32 number on its way from the device: taken along by whoever waits for the device anyway."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._value = torch.zeros((), dtype=torch.float32, pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None

    def send(self, scalar: torch.Tensor) -> None:
        """Issues the copy on the current stream. scalar: float32 []."""
        self._value.copy_(scalar, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def take(self) -> float:
        """The number last sent; blocks until it is here."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)


class RankNumbers:
    """Numbers of all processes, gathered on a stream of their own: not behind all that the main stream has been given.
    (A kernel that is being handed out to the whole device, as the step of its states is, still goes first.)"""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """[process][number], float64, the same on every process. A collective; equally many numbers everywhere."""
        # torch.cuda.stream(None) changes nothing
        with torch.cuda.stream(self._stream):
            mine = to_device(torch.tensor(numbers, dtype=torch.float64), self._device)
            every = mine.new_empty(dist.get_world_size(), len(numbers))
            # into one tensor would be all_gather_into_tensor, which torch 2.13 tells users is deprecated
            dist.all_gather(list(every), mine)
            return every.tolist()
