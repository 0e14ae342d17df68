"""Parameters without a gradient: the ranks agree on which, before FSDP2 reduces.

FSDP2 reduces the gradients that are there. Where a module decides by its data which of its parts it uses, a parameter
may have a gradient on one rank and none on another, and the ranks would add up buffers of different layout. Before a
group is reduced, the ranks exchange one bitmap: what has a gradient anywhere gets zeros where it has none. What has
none on any rank keeps none, and is not stepped: no decay, no decay of moments, as in torch.

Which groups: the root (for a custom module that is all of it), and layers that hold a list or dictionary of modules
to choose from. Left out: whole layers that one rank runs and another skips; each would wait for the other's gather.
Give such a model no `_no_split_modules`: it is then one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from heavylift.api.distributed import flags_device
from heavylift.api.recompute import is_hugging_face
from heavylift.sharding import GatherGroup, ShardedModel


class _Slots:
    """Where a group's trainable parameters are looked up: gathered or sharded, whichever they are at the moment."""

    def __init__(self, group: GatherGroup, owners: dict[nn.Parameter, tuple[nn.Module, str]]) -> None:
        self.module = group.module
        self._places = [owners[p] for _, p in group.params if p.requires_grad]
        self.seen = [False] * len(self._places)
        """Had a gradient in a backward since the last reduction, on this rank."""
        self.agreed = False
        """In the backward under way."""

    def params(self) -> list[nn.Parameter]:
        return [owner._parameters[name] for owner, name in self._places]  # type: ignore[misc]


class GradientPresence:
    """Hooks a sharded model so that every reduction is of the same parameters on all ranks."""

    def __init__(self, sharded: ShardedModel, device: torch.device) -> None:
        """On one rank nothing needs agreement and nothing is hooked."""
        self._device = device
        self._reduces = True
        self._handles: list[RemovableHandle] = []
        self._guarded: list[_Slots] = []
        if dist.get_world_size() == 1:
            return
        owners = {
            param: (module, name)
            for module in sharded.module.modules()
            for name, param in module.named_parameters(recurse=False)
        }
        for group in sharded.groups:
            slots = _Slots(group, owners)
            if slots.seen and (group.module is sharded.module or _chooses(group.module)):
                self._guarded.append(slots)
                hook = self._make_pre_hook(slots)
                self._handles.append(group.module.register_forward_pre_hook(hook, with_kwargs=True))

    def watch(self, loss: torch.Tensor, reduces: bool) -> torch.Tensor:
        """`loss`, as a new node whose backward ends with the agreement. `reduces`: whether FSDP2 reduces in it."""
        watched = loss * 1.0  # a node of its own: its hook runs before those that FSDP2 has put on the model's outputs
        if self._guarded and watched.requires_grad:
            watched.register_hook(lambda _: self._begin_backward(reduces))
        return watched

    def _begin_backward(self, reduces: bool) -> None:
        self._reduces = reduces
        for slots in self._guarded:
            slots.agreed = False
        # callbacks run in the order in which they were queued: before FSDP2's, which reduces
        Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for slots in self._guarded:
            if not slots.agreed:
                self.agree(slots)

    @torch.no_grad()
    def agree(self, slots: _Slots) -> None:
        """Gives this rank zeros where only other ranks have a gradient. A collective where gradients are reduced."""
        slots.agreed = True
        params = slots.params()
        here = [p.grad is not None or seen for p, seen in zip(params, slots.seen, strict=True)]
        if not self._reduces:
            slots.seen = here
            return
        anywhere = torch.tensor(here, dtype=torch.uint8, device=flags_device(self._device))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        for param, mine, others in zip(params, here, anywhere.tolist(), strict=True):
            if others and not mine:
                assert not isinstance(param, DTensor), "a group is reduced before the ranks have agreed"
                param.grad = torch.zeros_like(param)
        slots.seen = [False] * len(params)

    def _make_pre_hook(self, slots: _Slots) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled():
                return None
            leaves, spec = tree_flatten((args, kwargs))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if not places:
                return None  # FSDP2 then reduces at the very end, after the callback above
            outputs = _AgreeInBackward.apply(self, slots, *(leaves[i] for i in places))
            for place, output in zip(places, outputs, strict=True):
                leaves[place] = output
            return tree_unflatten(leaves, spec)

        return hook

    def forget(self) -> None:
        """The gradients that have not been reduced yet are forgotten."""
        for slots in self._guarded:
            slots.seen = [False] * len(slots.seen)

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._guarded.clear()


class _AgreeInBackward(torch.autograd.Function):
    """Identity. Its backward runs when that of the group's module is done, just before FSDP2's own, which reduces."""

    @staticmethod
    def forward(ctx: Any, presence: GradientPresence, slots: _Slots, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.presence, ctx.slots = presence, slots
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if not ctx.slots.agreed:
            ctx.presence.agree(ctx.slots)
        return (None, None, *grads)


def presence_varies(sharded: ShardedModel) -> bool:
    """Whether micro-batches may differ in which parameters they give a gradient to."""
    layers = [group.module for group in sharded.groups if group.module is not sharded.module]
    return not is_hugging_face(sharded.module) or any(_chooses(layer) for layer in layers)


def _chooses(module: nn.Module) -> bool:
    """Whether a layer holds modules that its forward may choose among (experts, branches)."""
    inner: Sequence[nn.Module] = [m for m in module.modules() if m is not module]
    return any(isinstance(m, (nn.ModuleList, nn.ModuleDict)) for m in inner)
