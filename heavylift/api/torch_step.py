"""Any optimizer of torch.optim on sharded parameters, with what a step here is: unscale, norm, clip, skip, masters.

The optimizer itself runs unchanged, on DTensors. Where parameters are not float32 it steps float32 masters, and the
parameters are their rounded values; where somebody else has written a parameter, its master follows. Gradients add up
in float32 over the micro-batches of a step, as with `TieredAdamW`. Left out: tiers; everything lies on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from heavylift.errors import UserError
from heavylift.offload.groups import differs, local_tensor
from heavylift.offload.loss_scale_names import TellsLossScale

_ABOUT_SHARDS = ("DTensor", "sharding strategy", "placement")
"""Words of what torch says where an operation does not take shards."""


class TorchStep(TellsLossScale, torch.optim.Optimizer):
    """Wraps `inner`, an optimizer over the sharded parameters themselves; shares its groups, state and defaults."""

    def __init__(self, inner: torch.optim.Optimizer, max_grad_norm: float) -> None:
        """Repoints the groups of `inner` to float32 masters where the parameters are not float32."""
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.state, self.defaults = inner.state, inner.defaults
        self.grad_norm = 0.0
        """Global norm of the last step's gradients, before clipping, without the loss scale."""
        self.skipped = False
        """Whether the last step was skipped because that norm was not finite."""
        self.on_zero_grad: Callable[[], None] | None = None
        """As in `TieredAdamW`."""
        self._max_grad_norm = max_grad_norm
        self._scale = 1.0
        self._accumulated: dict[nn.Parameter, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        """Parameter -> what the optimizer steps: its float32 copy, or the parameter itself."""
        for group in inner.param_groups:
            group["params"] = [self._take_over(p) for p in group["params"]]
        self.param_groups = inner.param_groups

    def _take_over(self, param: nn.Parameter) -> nn.Parameter:
        if not param.requires_grad:
            return param
        if param.dtype == torch.float32:
            self._masters[param] = param
            return param
        self._hooks.append(param.register_post_accumulate_grad_hook(partial(self._accumulate, param)))
        master = nn.Parameter(param.detach().float(), requires_grad=True)
        self._masters[param] = master
        return master

    @torch.no_grad()
    def _accumulate(self, param: nn.Parameter, _: torch.Tensor) -> None:
        """Float32 sums instead of those that autograd would round after every micro-batch."""
        assert param.grad is not None
        grad = param.grad.detach().float()
        total = self._accumulated.get(param)
        self._accumulated[param] = grad if total is None else total.add_(grad)
        param.grad = None

    def master_of(self, param: nn.Parameter) -> nn.Parameter:
        """The float32 value behind `param`; the parameter itself where that is float32."""
        return self._masters.get(param, param)

    def trains(self, param: nn.Parameter) -> bool:
        """Whether it steps `param`."""
        return param in self._masters

    def grad_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """The gradient that the coming step will use, with its scale; the tensor itself."""
        return self._accumulated.get(param) if param in self._accumulated else param.grad

    @property
    def overflow(self) -> bool:
        """`skipped`, by the name that Accelerate and scripts for DeepSpeed look for."""
        return self.skipped

    @property
    def grad_scale(self) -> float:
        """The factor that gradients carry."""
        return self._scale

    @torch.no_grad()
    def write_master(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Sets master and parameter from this rank's values (any float dtype, flat)."""
        for target in {self.master_of(param), param}:
            local = local_tensor(target)
            local.copy_(values.view(local.shape))

    @torch.no_grad()
    def follow(self, param: nn.Parameter) -> None:
        """The master takes what somebody else has written into `param`; elsewhere it keeps the bits that the
        parameter's dtype does not show. By value: a write through `.data` moves no version counter."""
        master = self.master_of(param)
        if master is param:
            return
        shard, kept = local_tensor(param), local_tensor(master)
        written = differs(kept.to(shard.dtype), shard)
        kept.copy_(torch.where(written, shard.to(kept.dtype), kept))

    def follow_parameters(self) -> None:
        """`follow` of all that it steps."""
        for param in self._masters:
            self.follow(param)

    def set_grad_scale(self, scale: float) -> None:
        """Gradients of the coming step carry this factor."""
        self._scale = scale

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Unscale, norm, clip, step. A norm that is not finite skips the step: every bit stays."""
        assert closure is None, "a closure would run backward outside of the engine"
        grads = self._take_grads()
        self.grad_norm = self._norm(list(grads.values())) / self._scale
        self.skipped = not math.isfinite(self.grad_norm)
        if self.skipped:
            self._drop_grads()
            return
        self.follow_parameters()
        factor = 1.0 / self._scale
        if self._max_grad_norm > 0:
            # the formula of torch.nn.utils.clip_grad_norm_
            factor *= min(1.0, self._max_grad_norm / (self.grad_norm + 1e-6))
        for param, grad in grads.items():
            if factor != 1.0:
                grad.mul_(factor)
            self._masters[param].grad = grad
        self._step_inner()
        for param, master in self._masters.items():
            if master is not param:
                local_tensor(param).copy_(local_tensor(master))
        self._drop_grads()

    def _step_inner(self) -> None:
        try:
            self.inner.step()
        except (RuntimeError, NotImplementedError) as error:
            if not any(word in str(error) for word in _ABOUT_SHARDS):
                raise
            raise UserError(
                f"optimizer: {type(self.inner).__name__} cannot step sharded parameters, which are DTensors "
                f"({' '.join(str(error).split())[:120]}); use torch.optim.AdamW, or one that steps each element by "
                "itself"
            ) from None

    def _take_grads(self) -> dict[nn.Parameter, torch.Tensor]:
        """Gradients of this step, float32. Parameters without one are left out, as torch does."""
        grads = {}
        for param in self._masters:
            grad = self.grad_of(param)
            if grad is not None:
                grads[param] = grad
        return grads

    def _norm(self, grads: list[torch.Tensor]) -> float:
        """In float64, over all shards; replicas count once."""
        if not self._masters:
            return 0.0
        any_param = next(iter(self._masters))
        total = torch.zeros((), dtype=torch.float64, device=local_tensor(any_param).device)
        for grad in grads:
            total += torch.linalg.vector_norm(local_tensor(grad), dtype=torch.float64).square()
        if isinstance(any_param, DTensor):
            for axis, placement in enumerate(any_param.placements):
                if isinstance(placement, Shard) and any_param.device_mesh.size(axis) > 1:
                    dist.all_reduce(total, group=any_param.device_mesh.get_group(axis))
        return float(total.sqrt())

    def _drop_grads(self) -> None:
        self._accumulated.clear()
        for param, master in self._masters.items():
            param.grad = master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients since the last step."""
        if self.on_zero_grad is not None:
            self.on_zero_grad()
        self._drop_grads()

    def synchronize(self) -> None:
        """Nothing runs beside the caller here."""

    def close(self) -> None:
        """Lets go of the parameters' gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the optimizer inside. Masters are set by `write_master`."""
        self.inner.load_state_dict(state_dict)
