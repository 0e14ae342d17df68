"""The inputs of checkpointed layers in host memory (DeepSpeed's `cpu_checkpointing`).

With activation checkpointing, what is left of a layer between forward and backward is its input: tokens x hidden, once
per layer. Here it goes to a slot of page-locked memory on a side stream while the layer computes, and comes back one
layer ahead of backward:

    forward   layer i begins: copy its input down; layer i + 1 begins: the input of layer i is let go on the GPU
    backward  layer i begins: its input is there; start to copy up that of the layer below

The last layer's input is still on the GPU when backward needs it. On a CPU both copies are plain ones. The copies are
exact, so losses and gradients keep their bits.

Left out: tensors that several layers share (masks, rotary tables): they stay on the GPU, once.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from heavylift.config.words import counted
from heavylift.errors import UserError
from heavylift.memory.refusal import host_memory_for
from heavylift.offload.tiers import HostSlab, TierUsage, aligned_bytes


class _Boundary:
    """What autograd holds in place of a layer's input. Its slot is free again when autograd lets go of it."""

    def __init__(self, store: BoundaryStore, slot: int, tensor: Tensor) -> None:
        self._store = store
        self.slot = slot
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.on_device: Tensor | None = None
        """The input itself until the next layer begins, or what has been fetched ahead."""
        self.event: torch.cuda.Event | None = None
        """The last copy, down or up."""
        self.fetched = False
        self.below: weakref.ref[_Boundary] | None = None
        """That of the layer before, which backward needs next."""

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if self.fetched and self.on_device is not None and self.event is not None:
            # fetched for nobody: its memory must not be handed out while the copy still writes there
            torch.cuda.current_stream(self.on_device.device).wait_event(self.event)
        self._store.free_slots.append(self.slot)


class BoundaryStore:
    """A fixed number of slots in one slab, allocated at the first use."""

    def __init__(
        self, num_slots: int, slot_bytes: int, device: torch.device, key: str = "train.cpu_checkpointing"
    ) -> None:
        """`num_slots`: layer inputs alive at a time, one per checkpointed layer; `slot_bytes`: the largest of them;
        `key`: of the configuration, which asks for all this."""
        assert num_slots > 0 and slot_bytes > 0, f"{num_slots=} {slot_bytes=}"
        self._slot_bytes = aligned_bytes(slot_bytes, torch.uint8)
        self._num_slots = num_slots
        self._device = device
        self._key = key
        self._slots: list[Tensor] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._latest: weakref.ref[_Boundary] | None = None
        self.free_slots: deque[int] = deque()
        self.usage = TierUsage()
        """Host bytes that are really taken."""

    @property
    def num_bytes(self) -> int:
        """Host bytes of all slots, for the plan."""
        return self._num_slots * self._slot_bytes

    def attach(self, layer: nn.Module) -> None:
        """Keeps `layer`'s input here. After `layer.compile()`; the layer is one that is checkpointed.

        In front of the compiled call, not in it: copies on another stream are nothing to compile.
        """
        if layer._compiled_call_impl is None:
            layer.forward = self._around(layer, layer.forward)
        else:
            layer._compiled_call_impl = self._around(layer, layer._compiled_call_impl)

    def _around(self, layer: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not args and "hidden_states" in kwargs:
                # checkpointing hands to the hooks what is positional
                args = (kwargs.pop("hidden_states"),)
            if not (layer.training and torch.is_grad_enabled() and args and isinstance(args[0], Tensor)):
                return call(*args, **kwargs)
            with self.keeping(args[0]):
                return call(*args, **kwargs)

        return run

    def keeping(self, boundary: Tensor) -> saved_tensors_hooks:
        """Context of one call of a checkpointed layer: what autograd saves of `boundary` comes here."""
        return saved_tensors_hooks(_Packer(self, boundary), _unpack)

    def put(self, tensor: Tensor) -> _Boundary:
        """Starts to copy `tensor` into a free slot. Raises UserError when it is larger than the slots, or the host
        refuses their memory."""
        if tensor.nbytes > self._slot_bytes:
            raise UserError(
                f"{self._key}: expected layers to hand on at most {self._slot_bytes} bytes (micro-batch x "
                f"sequence x hidden size), got {tensor.nbytes} {tuple(tensor.shape)}; set it to false for this model"
            )
        boundary = _Boundary(self, self._take_slot(), tensor)
        if self._stream is None:
            self._view(boundary).copy_(tensor)
            return boundary
        previous = self._latest() if self._latest is not None else None
        if previous is not None and previous.on_device is not None and not previous.fetched:
            # begun a layer ago: the copy is done or nearly so
            self._wait(previous)
            previous.on_device = None
        boundary.below, self._latest = self._latest, weakref.ref(boundary)
        boundary.on_device = tensor
        self._copy(self._view(boundary), tensor, boundary)
        return boundary

    def get(self, boundary: _Boundary) -> Tensor:
        """The tensor on its device, its values there for the current stream; starts to fetch the one below."""
        if self._stream is None:
            return self._view(boundary).clone()
        if boundary.on_device is None:
            self._fetch(boundary)
        assert boundary.on_device is not None
        if boundary.fetched:
            self._wait(boundary)
        tensor, boundary.on_device, boundary.fetched = boundary.on_device, None, False
        below = boundary.below() if boundary.below is not None else None
        if below is not None and below.on_device is None:
            self._fetch(below)
        return tensor

    def _fetch(self, boundary: _Boundary) -> None:
        # memory of the current stream, which is done with it before the side stream writes (see `_copy`)
        boundary.on_device = torch.empty(boundary.shape, dtype=boundary.dtype, device=self._device)
        boundary.fetched = True
        self._copy(boundary.on_device, self._view(boundary), boundary)

    def _copy(self, target: Tensor, source: Tensor, boundary: _Boundary) -> None:
        # one stream for both ways: a slot is never written before its last reader is done
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            boundary.event = torch.cuda.Event()
            boundary.event.record(self._stream)

    def _wait(self, boundary: _Boundary) -> None:
        """The current stream goes on after the last copy of `boundary`."""
        assert boundary.event is not None
        torch.cuda.current_stream(self._device).wait_event(boundary.event)

    def _view(self, boundary: _Boundary) -> Tensor:
        num_bytes = boundary.shape.numel() * boundary.dtype.itemsize
        return self._slots[boundary.slot][:num_bytes].view(boundary.dtype).view(boundary.shape)

    def _take_slot(self) -> int:
        if not self._slots:
            what = f"the inputs of {counted(self._num_slots, 'layer')}"
            with host_memory_for(what, self._key, "use smaller micro-batches, or set it to false"):
                slab = HostSlab(self.num_bytes, pinned=self._device.type == "cuda", usage=self.usage)
            self._slots = [slab.take(self._slot_bytes, torch.uint8) for _ in range(self._num_slots)]
            self.free_slots.extend(range(self._num_slots))
        if not self.free_slots:
            gc.collect()  # a graph that nobody holds but itself
        assert self.free_slots, f"all {self._num_slots} slots are taken: a forward without its backward is still alive"
        return self.free_slots.popleft()


class _Packer:
    """The pack hook of one call of a layer: its input goes to the store, anything else stays as it is."""

    def __init__(self, store: BoundaryStore, boundary: Tensor) -> None:
        self._store = store
        self._address, self._numel, self._dtype = boundary.data_ptr(), boundary.numel(), boundary.dtype
        self._packed: tuple[torch.Size, weakref.ref[_Boundary]] | None = None

    def __call__(self, tensor: Tensor) -> Any:
        # by address: FSDP2 and the compiler hand on the same values as another tensor object
        is_boundary = (
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.dtype == self._dtype
            and tensor.numel() == self._numel
            and tensor.is_contiguous()
            and tensor.data_ptr() == self._address
        )
        if not is_boundary:
            # detached: a saved output that holds its own node would never be freed
            return tensor.detach() if tensor.grad_fn is not None else tensor
        packed = None if self._packed is None or self._packed[0] != tensor.shape else self._packed[1]()
        if packed is None:
            packed = self._store.put(tensor.detach())
            self._packed = (tensor.shape, weakref.ref(packed))
        return packed


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _Boundary):
        return packed._store.get(packed)
    assert isinstance(packed, Tensor), type(packed)
    return packed
