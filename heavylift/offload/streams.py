"""The CUDA streams of the optimizer's copies."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Streams:
    """Side streams for the two directions of the bus; None on a machine without CUDA, where copies are immediate.

    `d2h`: gradients, as they come. `fetch`: down, too, what a step asks for piece by piece: on `d2h` that would come
    behind gradients that backward, which is issued far ahead, has not computed yet.

    Made once: new streams per step would grow the allocator's pools.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self.d2h = torch.cuda.Stream(device) if is_cuda else None
        self.fetch = torch.cuda.Stream(device) if is_cuda else None
        self.h2d = torch.cuda.Stream(device) if is_cuda else None

    def d2h_after_current(self) -> None:
        """The copies down begin after what has been issued on the current stream."""
        if self.d2h is not None:
            self.d2h.wait_stream(torch.cuda.current_stream(self.device))

    def step_after_current(self) -> None:
        """What a step fetches, and its copies up, which overwrite shards, begin after what has been issued on the
        current stream."""
        for stream in (self.fetch, self.h2d):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        """Blocks until all copies are done: before their host memory is unlocked."""
        for stream in (self.d2h, self.fetch, self.h2d):
            if stream is not None:
                stream.synchronize()


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Context of a stream, or none."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def record(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """An event behind what has been issued on the stream."""
    return None if stream is None else stream.record_event()
