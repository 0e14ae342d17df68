"""Groups as the optimizer sees them: the flat layout of one gather group's shard on this rank.

FSDP2 reduces the gradients of a group into one flat buffer: for each parameter that has a gradient its padded shard,
one after the other. Our states use the same layout, so a whole group moves and steps as one range. Padding (a dim 0
that the ranks do not divide) is laid out and never read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from heavylift.errors import UserError
from heavylift.offload.gates import Gate


@dataclass(eq=False)
class Segment:
    """One parameter's shard inside its group's flat layout."""

    name: str
    param: nn.Parameter
    start: int
    """First element in the group's flat layout."""
    numel: int
    """Elements of the shard on this rank, without padding; 0 on ranks that got nothing."""
    first: int = 0
    """Index of the shard's first element in the whole parameter."""
    num_steps: int = 0
    """Optimizer steps that this parameter has taken: it takes none when it has no gradient (as torch.optim does)."""
    seen: tuple[int, int, int] | None = None
    """Address and versions of the shard when the optimizer last agreed with it; else the master is read anew."""

    @property
    def stop(self) -> int:
        """End of the shard in the flat layout."""
        return self.start + self.numel

    def is_seen(self) -> bool:
        """Whether nobody else has written the shard since `mark_seen`."""
        return self.seen == self._fingerprint()

    def mark_seen(self) -> None:
        """The optimizer's master agrees with the shard as it is now."""
        self.seen = self._fingerprint()

    def _fingerprint(self) -> tuple[int, int, int]:
        # two counters: `param.copy_(...)` moves that of the DTensor, a write into `param.to_local()` that of the shard,
        # and a detached DTensor (`local_tensor`) hides the latter. Writes through `.data` move neither, as in autograd
        shard = local_view(self.param)
        return shard.data_ptr(), self.param._version, shard._version

    def shard(self) -> torch.Tensor:
        """The shard's values, flat [numel], a view. Looked up each time: FSDP2 may re-allocate it until first use."""
        return local_tensor(self.param).view(-1)

    def grad(self) -> torch.Tensor | None:
        """The shard's gradient, flat [numel], or None."""
        grad = self.param.grad
        return None if grad is None else local_view(grad).reshape(-1)


_UNDER_WAY = (
    "while its step was still under way, which writes it too; wait for the step first (engine.settle(), or "
    "synchronize() of the optimizer), and write again"
)
STEP_TAKEN = (
    "between backward, which has taken its step, and step(); write before backward or after step(), or take schedule "
    "deferred or synchronous"
)


@dataclass(eq=False)
class Group:
    """Parameters that are gathered, reduced, moved and stepped together."""

    name: str
    segments: tuple[Segment, ...]
    numel: int
    """Elements of the flat layout, padding included."""
    dtype: torch.dtype
    """Dtype of the parameters and of their reduced gradients."""
    device: torch.device
    module: nn.Module | None = None
    """The FSDP2 module that gathers the group, None for plain parameters."""
    gate: Gate = field(init=False)

    def __post_init__(self) -> None:
        self.gate = Gate(self._settled)

    def _settled(self) -> None:
        self.check_unwritten(_UNDER_WAY)
        for segment in self.segments:
            if not isinstance(segment.param, DTensor):  # those are seen, by the check
                segment.mark_seen()

    def check_unwritten(self, when: str) -> None:
        """Raises UserError, saying `when`, where somebody else has written a sharded parameter since the optimizer last
        agreed with it: the optimizer's own copies go through detached DTensors, which move no counter. Plain parameters
        are not looked at: those copies move theirs, and nobody can write them in between, as step() waits."""
        written = [s.name for s in self.segments if isinstance(s.param, DTensor) and not s.is_seen()]
        if written:
            more = f" (and {len(written) - 1} more)" if len(written) > 1 else ""
            raise UserError(f"{written[0]}{more} was written {when}")

    @property
    def segment_numels(self) -> tuple[int, ...]:
        """Elements that each segment takes in the flat layout, padding included."""
        starts = [segment.start for segment in self.segments]
        return tuple(stop - start for start, stop in pairwise([*starts, self.numel]))

    def grads(self) -> torch.Tensor:
        """The group's gradients, flat [numel]: without a copy where they lie so; zeros where there is none."""
        flat = self.flat_grad()
        if flat is None:
            flat = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
            for segment in self.segments:
                grad = segment.grad()
                if grad is not None:
                    flat[segment.start : segment.stop] = grad
        return flat

    def flat_grad(self) -> torch.Tensor | None:
        """All gradients of the group as one tensor [numel] without a copy, or None when they do not lie so."""
        grads = [local_view(s.param.grad) if s.param.grad is not None else None for s in self.segments]
        first = grads[0]
        if first is None or first.dtype != self.dtype:
            return None
        storage, offset = first.untyped_storage(), int(first.storage_offset())
        for segment, grad in zip(self.segments, grads, strict=True):
            if grad is None or not grad.is_contiguous():
                return None
            same_storage = grad.untyped_storage().data_ptr() == storage.data_ptr()
            if segment.numel > 0 and not (same_storage and grad.storage_offset() - offset == segment.start):
                return None
        if storage.nbytes() < (offset + self.numel) * self.dtype.itemsize:
            return None
        return torch.empty(0, dtype=self.dtype, device=first.device).set_(storage, offset, (self.numel,), (1,))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, detached: the local shard of a DTensor, else the tensor itself."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as `local_tensor`, not detached: a tenth of the time, and writes count as the shard's."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not torch.is_grad_enabled():
        return tensor.to_local()
    with torch.no_grad():  # with gradients `to_local` returns a node of autograd's graph
        return tensor.to_local()


def differs(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one shape and dtype have other bits, bool; NaNs always differ."""
    return (old != new) | (torch.signbit(old) != torch.signbit(new))


def padded_numel(param: torch.Tensor) -> int:
    """Elements that FSDP2 lays out for a parameter on each rank: dim 0 rounded up to the number of shards."""
    if not isinstance(param, DTensor) or param.ndim == 0:
        return param.numel()
    return -(-param.shape[0] // num_shards(param)) * math.prod(param.shape[1:])


def first_element(param: torch.Tensor) -> int:
    """Index of this rank's first element in the whole parameter, flat. The others follow one by one where dim 0 is what
    is sharded."""
    if not isinstance(param, DTensor):
        return 0
    _, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return sum(offset * math.prod(param.shape[axis + 1 :]) for axis, offset in enumerate(offsets))


def num_shards(param: torch.Tensor) -> int:
    """Ranks that a parameter is sharded over."""
    if not isinstance(param, DTensor):
        return 1
    return math.prod(param.device_mesh.size(axis) for axis, p in enumerate(param.placements) if isinstance(p, Shard))


def make_group(name: str, params: Iterable[tuple[str, nn.Parameter]], module: nn.Module | None = None) -> Group | None:
    """Lays out the trainable parameters of one gather group; None when all are frozen.

    Raises UserError for parameters of several dtypes, which FSDP2 cannot reduce together.
    """
    segments: list[Segment] = []
    start = 0
    for param_name, param in params:
        if param.requires_grad:
            segments.append(Segment(param_name, param, start, local_tensor(param).numel(), first_element(param)))
            start += padded_numel(param)
    if not segments:
        return None
    dtypes = {s.param.dtype for s in segments}
    if len(dtypes) > 1:
        raise UserError(
            f"group {name}: its trainable parameters should have one dtype, got "
            f"{' and '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}; cast the model to one"
        )
    device = local_tensor(segments[0].param).device
    return Group(name, tuple(segments), start, dtypes.pop(), device, module)


def plain_groups(params: Sequence[nn.Parameter]) -> list[Group]:
    """Groups for parameters without FSDP2: one per (dtype, device)."""
    buckets: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    for index, param in enumerate(params):
        buckets.setdefault((param.dtype, local_tensor(param).device), []).append((f"param{index}", param))
    made = (make_group(f"plain{i}", bucket) for i, bucket in enumerate(buckets.values()))
    return [group for group in made if group is not None]
