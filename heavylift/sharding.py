"""ZeRO stages on PyTorch's FSDP2: what is sharded. (Where it lives is the optimizer's business: `offload`.)

| stage | parameters between forward and backward | gradients between micro-batches | optimizer states |
|---|---|---|---|
| 3 | sharded | sharded (reduced every micro-batch) | sharded |
| 2 | whole | sharded (reduced every micro-batch) | sharded |
| 1 | whole | whole (reduced once, after the last micro-batch) | sharded |
| 0 | whole | whole (reduced once) | whole on every rank |

A *group* is what FSDP2 gathers together: one decoder layer; the embedding; the head; what is left at the root. Tied
weights must stay in one group (torch 2.13 raises, 2.11 silently unties them), so a tied embedding stays at the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from heavylift.errors import UserError


@dataclass(frozen=True)
class GatherGroup:
    """The parameters that FSDP2 gathers together, in the order in which the model owns them."""

    name: str
    module: nn.Module
    """An `FSDPModule`: `fully_shard` has been called on it."""
    params: tuple[tuple[str, nn.Parameter], ...]


@dataclass(frozen=True)
class ShardedModel:
    """A model under `fully_shard`, with our own list of its groups in forward order."""

    module: nn.Module
    groups: tuple[GatherGroup, ...]
    stage: int
    mesh: DeviceMesh

    _versions: dict[int, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Of gathered parameters that were written: the version that nothing is to be said about any more."""

    def reshard(self) -> None:
        """Frees gathered parameters. A forward without backward leaves groups gathered that are not resharded in
        forward (the root; below stage 3 all), and the parameters of the module are then not the shards.

        Raises UserError, once, where somebody has written into gathered parameters since the last call.
        """
        written = self._written()
        for group in self.groups:
            assert isinstance(group.module, FSDPModule)
            group.module.reshard()
        if written:
            more = f" (and {len(written) - 1} more)" if len(written) > 1 else ""
            raise UserError(
                f"{written[0]}{more} was written while it was gathered for a forward, by it or after it, so this is "
                "lost; write inside of zero.GatheredParameters(..., modifier_rank=0), or call engine.settle() before "
                "writing"
            )

    def _written(self) -> list[str]:
        """FSDP2's own writes move no version."""
        written = []
        for param in (p for group in self.groups for p in fsdp_params(group.module)):
            gathered = gathered_twin(param)
            if gathered is None or gathered.is_inference():
                continue  # nobody counts what is written into tensors of inference_mode
            if gathered._version != self._versions.get(id(gathered), 0):
                self.accept_write(gathered)
                written.append(param._param_fqn or "a parameter")
        return written

    def accept_write(self, gathered: nn.Parameter) -> None:
        """What has been written into a gathered parameter until now is in its shards, or has been told."""
        self._versions[id(gathered)] = gathered._version

    def recover(self) -> bool:
        """After an exception inside of a forward: shards again, ready for the next. Gradients not yet reduced are lost.

        False where this torch (before 2.13) cannot: the gathered parameters then stay what they are.
        """
        reset = getattr(self.module, "reset_iter_state", None)
        if reset is None:
            return False
        reset()
        return True

    def discard_unreduced(self) -> None:
        """Forgets the gradients that stages 0 and 1 keep whole on their rank until the last micro-batch."""
        for param in (p for group in self.groups for p in fsdp_params(group.module)):
            param.unsharded_accumulated_grad = None
            unsharded = gathered_twin(param)
            if unsharded is not None:
                unsharded.grad = None

    def set_last_micro_batch(self, is_last: bool) -> None:
        """Stages 0 and 1 reduce gradients and reshard parameters in the last micro-batch of a step only."""
        if self.stage > 1:
            return
        root = self.module
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(is_last)
        root.set_reshard_after_backward(is_last)


def fsdp_params(module: nn.Module) -> list[Any]:
    """FSDP2's own records of the parameters that `module` gathers."""
    group = param_group(module)
    return [] if group is None else list(group.fsdp_params)


def param_group(module: nn.Module) -> Any:
    """What FSDP2 keeps of the parameters that `module` gathers; None where it gathers none."""
    assert isinstance(module, FSDPModule), f"{type(module)} is not under fully_shard"
    return module._get_fsdp_state()._fsdp_param_group


def join_nested_forwards(module: nn.Module) -> None:
    """Makes a call of `module` from inside of one of its own forward methods part of that forward, as torch 2.13 does.

    torch 2.11 registers another end of its backward there: FSDP2 then reduces before the method's own gradients are
    there, and those would be reduced with the next step's.
    """
    group = param_group(module)
    if group is None:
        return
    pre_forward = group.pre_forward

    def pre_forward_once(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if group._training_state is TrainingState.FORWARD:
            return args, kwargs  # gathered already
        return pre_forward(module, args, kwargs)

    group.pre_forward = pre_forward_once


def gathered_twin(param: Any) -> nn.Parameter | None:
    """What takes the place of a parameter (one of `fsdp_params`) while it is gathered; made by the first forward."""
    return vars(param).get("_unsharded_param")


def make_mesh(stage: int, device_type: str) -> DeviceMesh:
    """The mesh of all ranks: 1-D for stages 1 to 3; for stage 0 world x 1, so that nothing is sharded.

    `fully_shard` on a 2-D mesh replicates over the first dimension and shards over the second.
    """
    world_size = dist.get_world_size()
    if stage == 0:
        return init_device_mesh(device_type, (world_size, 1), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))


def shard_model(
    model: nn.Module,
    stage: int,
    mesh: DeviceMesh,
    layers: Sequence[nn.Module] | None = None,
    before_group: Callable[[list[tuple[str, nn.Parameter]]], None] | None = None,
) -> ShardedModel:
    """Applies `fully_shard` group by group. Parameters may still be on the meta device.

    `layers`: the blocks that are gathered one by one; None: those of `layers_of`, and embedding and head; empty: the
    whole model is one group. `before_group` gets the named parameters of each group, whole, just before it is sharded.

    Gradients are summed over ranks in float32, not averaged: the loss is already divided by the number of trained
    tokens of the whole step.
    """
    assert stage in (0, 1, 2, 3), f"{stage=}"
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    names = {module: name for name, module in model.named_modules()}
    modules = [*layers_of(model), *_separate_ends(model)] if layers is None else list(layers)
    groups: list[GatherGroup] = []
    owned: set[nn.Parameter] = set()
    for module in [*modules, model]:
        prefix = names[module] + "." if names[module] else ""
        if before_group is not None:
            before_group([(prefix + name, p) for name, p in module.named_parameters() if p not in owned])
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3 and module is not model)
        assert isinstance(module, FSDPModule)
        # a plain sum on every back end: with a factor, NCCL multiplies before adding, and gloo has no average
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        params = tuple((prefix + name, p) for name, p in module.named_parameters() if p not in owned)
        owned.update(p for _, p in params)
        groups.append(GatherGroup(names[module] or "root", module, params))
    return ShardedModel(model, _in_forward_order(groups), stage, mesh)


def _in_forward_order(groups: list[GatherGroup]) -> tuple[GatherGroup, ...]:
    """The order in which a forward gathers them: the root first (its pre-hook runs before all others, though its own
    parameters, the final norm, are used last), then the embedding, the layers in their order, the head."""
    *inner, root = groups
    embedding = [g for g in inner if isinstance(g.module, nn.Embedding)]
    return (root, *embedding, *(g for g in inner if g not in embedding))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: those that Hugging Face says must not be split, else the largest `ModuleList`."""
    no_split = set(getattr(model, "_no_split_modules", None) or ())
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    chosen = [m for m in lists if all(type(block).__name__ in no_split for block in m)]
    if not chosen and lists:
        chosen = [max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))]
    return [block for blocks in chosen for block in blocks if next(block.parameters(), None) is not None]


def _separate_ends(model: nn.Module) -> list[nn.Module]:
    """Embedding and head as groups of their own, unless they share a weight with each other or anything else."""
    ends = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        end = getattr(model, getter, lambda: None)()
        if isinstance(end, nn.Module):
            ends.append(end)
    uses: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            uses[param] = uses.get(param, 0) + 1
    return [end for end in ends if all(uses[p] == 1 for p in end.parameters())]
