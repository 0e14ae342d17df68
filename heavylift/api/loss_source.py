"""Whether a loss comes from the engine's parameters: looked up in autograd's graph, before any collective.

A loss of another model, or of a tensor of the script's own, has a gradient, and PyTorch steps on without saying
anything. Here it would count as a step too, and where only some ranks make the mistake the others would wait for them.
Left out: what lies behind a custom `autograd.Function` (a reentrant checkpoint, a compiled graph) is not visible and
gets the benefit of the doubt.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from heavylift.sharding import GatherGroup, ShardedModel


class LossSource:
    """Knows a model's trained parameters, sharded and gathered."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._module = sharded.module
        # FSDP2 puts gathered parameters in the place of the shards and back again; graphs remember the gathered ones
        self._known: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
        # a layer that is compiled whole has its hooks compiled along, and, as each layer has another one, is compiled
        # anew for every layer; its graph hides its parameters anyway
        self._handles = [
            group.module.register_forward_pre_hook(self._make_pre_hook(group))
            for group in sharded.groups
            if group.module._compiled_call_impl is None and any(p.requires_grad for _, p in group.params)
        ]

    def _make_pre_hook(self, group: GatherGroup) -> Any:
        owned = {p for _, p in group.params if p.requires_grad}
        places = [
            (module, name)
            for module in group.module.modules()
            for name, param in module.named_parameters(recurse=False)
            if param in owned
        ]

        def hook(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling():
                return  # part of a module that is compiled whole
            for owner, name in places:
                param = owner._parameters[name]
                assert param is not None, name
                self._remember(param)

        return hook

    def _remember(self, param: nn.Parameter) -> None:
        if self._known.get(id(param)) is not param:
            self._known[id(param)] = param

    def is_behind(self, loss: torch.Tensor) -> bool:
        """Whether `loss`, which requires a gradient, depends on a trained parameter, or may do so.

        Looks from the loss downwards until it finds one: a few nodes, where the last layer is trained.
        """
        if self._reaches_known(loss):
            return True
        # a method called through the engine gathers the root without its forward, and leaves it gathered
        for param in self._module.parameters():
            if param.requires_grad:
                self._remember(param)
        return self._reaches_known(loss)

    def _reaches_known(self, loss: torch.Tensor) -> bool:
        if loss.grad_fn is None:
            return self._known.get(id(loss)) is loss
        seen = {loss.grad_fn}
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if isinstance(node, BackwardCFunction):
                return True  # it may hide one
            if node.name().endswith("AccumulateGrad") and self._known.get(id(node.variable)) is node.variable:
                return True
            following = {one for one, _ in node.next_functions if one is not None} - seen
            seen |= following
            waiting += following
        return False

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
