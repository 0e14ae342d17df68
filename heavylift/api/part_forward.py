"""A part of the model that is called by itself: `engine.module.encoder(x)`, which is also what `generate` of an
encoder-decoder does, or the model inside of a PEFT model.

FSDP2 gathers what lies at the root (the final norm, a tied embedding; all of a custom module) around the root's
forward. A part that is called outside of it gets the same around its own: parameters are gathered before, and the
gradients of the backward that follows are reduced at its end. Left out: a part of a layer that is gathered by itself,
called without that layer, and a part that only some ranks call: the others' shards are waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from heavylift.sharding import ShardedModel


class PartForwards:
    """Hooks on every module that owns parameters and is not in a layer gathered by itself."""

    def __init__(self, sharded: ShardedModel) -> None:
        root = sharded.module
        assert isinstance(root, FSDPModule), f"{type(root)} is not under fully_shard"
        self._root: FSDPModule | None = root
        self._state: Any = root._get_fsdp_state()
        self._part: nn.Module | None = None
        """The one that was called from outside, while it runs."""
        self._handles: list[RemovableHandle] = []
        gathered = {m for group in sharded.groups if group.module is not root for m in group.module.modules()}
        for module in root.modules():
            if module is root or module in gathered or next(module.parameters(), None) is None:
                continue
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or self._state._state_ctx.iter_forward_root is not None:
            return  # a forward is under way, of the root or of a part around this one
        if torch._C._current_graph_task_id() != -1:
            return  # a backward is, which gathers for what it computes again
        assert self._root is not None, "this engine is destroyed"
        self._part = module
        self._state._lazy_init()  # before a layer that is called first takes itself for the root
        self._root.unshard()  # at one shard the gate stands here, and not in the line below
        # without inputs: reduced when the whole backward is done, as other parts may have been called after this one
        self._state._pre_forward(self._root, (), {})

    def _leave(self, module: nn.Module, _: Any, output: Any) -> Any:
        if module is not self._part:
            return None
        self._part = None
        return self._state._post_forward(self._root, (), output)

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._root = self._part = self._state = None
