"""Memory of the tiers: exact slabs on the host, page-locked where the GPU copies to or from them.

PyTorch's pinned allocator rounds every block up to a power of two: up to twice the memory. A slab here is one
anonymous mapping of exactly the bytes asked for (rounded to pages), page-locked in place.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heavylift.config.schema import Tier
from heavylift.units import GIB

PAGE_BYTES = mmap.PAGESIZE
_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process


@dataclass
class TierUsage:
    """Bytes that the optimizer has allocated, by tier; what the plan promised is compared with this."""

    device_bytes: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
    """Part of `host_bytes` that is page-locked."""


class _Mapping(mmap.mmap):
    """Anonymous memory that is unlocked before it is unmapped. Tensors that point into it keep it alive.

    A page-locked range that is unmapped first stays in CUDA's books: the next mapping at that address then cannot be
    page-locked, or, worse, copies still go to the old pages.
    """

    registered_address: int | None = None

    def unregister(self) -> None:
        """Unlocks the pages, once."""
        if self.registered_address is not None and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.registered_address)
        self.registered_address = None

    def __del__(self) -> None:
        self.unregister()


class HostSlab:
    """One contiguous block of host memory, handed out front to back, freed as a whole."""

    def __init__(self, num_bytes: int, *, pinned: bool, usage: TierUsage) -> None:
        """Maps `num_bytes` (rounded up to pages), zero-filled. `pinned`: page-lock it for CUDA.

        Raises MemoryError when the mapping or the page-locking is refused.
        """
        self.num_bytes = whole_pages(num_bytes)
        self.is_pinned = pinned
        self._used_bytes = 0
        try:
            self._map = _Mapping(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the host refused a mapping of {self.num_bytes / GIB:.2f} GiB: {error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                # states are streamed end to end: 2 MiB pages spare the page-table walks
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without transparent huge pages: only slower
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if pinned:
            status = torch.cuda.cudart().cudaHostRegister(
                self._bytes.data_ptr(), self.num_bytes, _HOST_REGISTER_PORTABLE
            )
            if int(status) != 0:
                raise MemoryError(
                    f"page-locking {self.num_bytes / GIB:.2f} GiB of host memory failed (CUDA error {int(status)}); "
                    "raise the locked-memory limit (ulimit -l)"
                )
            self._map.registered_address = self._bytes.data_ptr()
        usage.host_bytes += self.num_bytes
        usage.pinned_bytes += self.num_bytes if pinned else 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `numel` elements as a flat tensor, starting at a cache line."""
        start = -(-self._used_bytes // 64) * 64
        stop = start + numel * dtype.itemsize
        assert stop <= self.num_bytes, f"slab of {self.num_bytes} bytes is too small: {start=} {numel=} {dtype=}"
        self._used_bytes = stop
        return self._bytes[start:stop].view(dtype)

    def close(self) -> None:
        """Unlocks the pages. The mapping itself lives as long as tensors point into it."""
        self._map.unregister()


def whole_pages(num_bytes: int) -> int:
    """Bytes that a slab of `num_bytes` really takes: whole pages, at least one."""
    return max(PAGE_BYTES, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)


def aligned_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that `HostSlab.take` needs for one tensor, alignment included."""
    return -(-numel * dtype.itemsize // 64) * 64


def place(num_elements: list[int], ratio: float, tier: Tier) -> list[int]:
    """How many elements of each group stay on the device tier, first groups first.

    `num_elements`: flat sizes in forward order. With `tier` host, `ratio` of all elements goes to the host, to the
    element: the group on the border is split. The next forward needs the first groups first, so they stay.
    """
    if tier is Tier.DEVICE:
        return list(num_elements)
    budget = sum(num_elements) - round(sum(num_elements) * ratio)
    placed = []
    for numel in num_elements:
        placed.append(min(numel, budget))
        budget -= placed[-1]
    return placed


def choose_streamed(host_numels: Sequence[int], share: float) -> list[bool]:
    """Which host parts are stepped on the GPU, their states streamed over the bus: about `share` of all elements.

    `host_numels`: sizes in forward order, 0 for groups without a host part. Both kinds are spread evenly, so that CPU
    and bus work at the same time, whatever the order.
    """
    chosen, streamed, seen = [], 0, 0
    for numel in host_numels:
        seen += numel
        chosen.append(numel > 0 and streamed + numel / 2 <= share * seen)
        streamed += numel * chosen[-1]
    return chosen


def least_streamed_share(host_numels: Sequence[int]) -> float:
    """The share from which on `choose_streamed` chooses anything of these; 0 where there is nothing to choose from."""
    least, seen = 1.0, 0
    for numel in host_numels:
        seen += numel
        if numel > 0:
            least = min(least, numel / 2 / seen)
    return least if seen else 0.0
