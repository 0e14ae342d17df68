"""Whether a loss comes from the engine's parameters: looked up in autograd's graph, before any collective.

A loss of another model, or of a tensor of the script's own, has a gradient, and PyTorch steps on without saying
anything. Here it would count as a step too, and where only some ranks make the mistake the others would wait for them.
Left out: what lies behind a custom `autograd.Function` (a reentrant checkpoint, a compiled graph) is not visible and
gets the benefit of the doubt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from heavylift.sharding import ShardedModel, fsdp_params, gathered_twin


class LossSource:
    """Knows a model's trained parameters, sharded and gathered.

    It hooks nothing: a hook of a layer that is compiled whole would be compiled along.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded: ShardedModel | None = sharded

    def is_behind(self, loss: torch.Tensor) -> bool:
        """Whether `loss`, which requires a gradient, depends on a trained parameter, or may do so.

        Looks from the loss downwards until it finds one: a few nodes, where the last layer is trained.
        """
        if loss.grad_fn is None:
            return id(loss) in self._known()
        known: set[int] = set()
        seen = {loss.grad_fn}
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if isinstance(node, BackwardCFunction):
                return True  # it may hide one
            if node.name().endswith("AccumulateGrad"):
                known = known or self._known()
                if id(node.variable) in known:
                    return True
            following = {one for one, _ in node.next_functions if one is not None} - seen
            seen |= following
            waiting += following
        return False

    def _known(self) -> set[int]:
        """Of all trained parameters, as they lie in the module at the moment and as FSDP2 gathers them: graphs remember
        the gathered ones, in whose places the shards are again after forward."""
        assert self._sharded is not None, "this engine is destroyed"
        found = {id(p) for p in self._sharded.module.parameters() if p.requires_grad}
        for param in (p for group in self._sharded.groups for p in fsdp_params(group.module)):
            gathered = gathered_twin(param)
            if gathered is not None and gathered.requires_grad:
                found.add(id(gathered))
        return found

    def close(self) -> None:
        """Lets go of the model."""
        self._sharded = None
