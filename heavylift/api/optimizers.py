"""DeepSpeed's optimizer classes by their names: what `initialize(optimizer=FusedAdam(...))` takes its settings from.

`initialize` reads class, parameter groups and hyperparameters, and trains with `TieredAdamW` on the tier that the
configuration says; nothing is allocated before. Without `initialize` they step by themselves: AdamW as `TieredAdamW`
(float32 masters and moments; `DeepSpeedCPUAdam` keeps them on the host and steps there), Adam with an L2 term
(`adam_w_mode` false and a weight decay) as `torch.optim.Adam`.

Optimizers that heavylift does not have raise UserError when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from heavylift.config.schema import Tier
from heavylift.errors import UserError
from heavylift.launch.cores import split_cores
from heavylift.memory.refusal import host_memory_for
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.options import TieredOptions
from heavylift.offload.param_groups import check_hyperparameters
from heavylift.ranks import on_this_machine


class _Adam(torch.optim.Optimizer):
    """Adam and AdamW. The states are made at the first step."""

    _tier = Tier.DEVICE

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        adam_w_mode: bool,
    ) -> None:
        if amsgrad:
            raise UserError(f"{type(self).__name__}: amsgrad is not supported; leave it out")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": bool(adam_w_mode),
        }
        self._inner: torch.optim.Optimizer | None = None
        super().__init__(params, defaults)
        check_hyperparameters(self.param_groups)
        self.adam_w_mode = int(adam_w_mode)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on the parameters as they are, outside of an engine."""
        if self._inner is None:
            self._inner = self._make_inner()
            if not isinstance(self._inner, TieredAdamW):
                self._inner.state = self.state  # whoever holds this optimizer's state sees it
        return self._inner.step(closure)

    def _make_inner(self) -> torch.optim.Optimizer:
        # the dictionaries of the groups are shared, so that a scheduler's learning rate arrives
        coupled = [group for group in self.param_groups if not group["adam_w_mode"] and group["weight_decay"] != 0]
        if any(not group["bias_correction"] for group in coupled):
            raise UserError(
                f"{type(self).__name__}: bias_correction=False is there with decoupled weight decay only; leave "
                "it out, or set adam_w_mode=True"
            )
        if coupled:
            return torch.optim.Adam(self.param_groups)
        options = TieredOptions(self._tier)
        if self._tier is Tier.HOST:
            # as `initialize` divides them: the ranks of this machine step side by side
            cores = split_cores(*on_this_machine())
            options = replace(options, num_threads=len(cores), cpu_ids=tuple(cores))
        with host_memory_for("the optimizer states", type(self).__name__, "use FusedAdam or a smaller model"):
            return TieredAdamW(self.param_groups, options=options)

    def state_dict(self) -> dict[str, Any]:
        """As torch's; of the optimizer inside once it has stepped."""
        return super().state_dict() if self._inner is None else self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of the same class."""
        if self._inner is None:
            self._inner = self._make_inner()
        self._inner.load_state_dict(state_dict)


class FusedAdam(_Adam):
    """AdamW (or Adam, `adam_w_mode=False`) on the device."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


class DeepSpeedCPUAdam(_Adam):
    """AdamW (or Adam, `adamw_mode=False`) with its states in host memory, stepped by the CPU."""

    _tier = Tier.HOST

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise UserError(
                "DeepSpeedCPUAdam: fp32_optimizer_states=False is not there; leave it out, and for moments in bfloat16 "
                "set bf16.bf16_optimizer_states in the configuration"
            )
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode)


class _Refused(torch.optim.Optimizer):
    """Raises UserError when it is made."""

    _instead = "FusedAdam, or DeepSpeedCPUAdam for states in host memory"

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UserError(f"{type(self).__name__} is not supported; use {self._instead}")


class DeepSpeedCPUAdagrad(_Refused):
    """Refused."""

    _instead = "torch.optim.Adagrad without offload, or DeepSpeedCPUAdam"


class DeepSpeedCPULion(_Refused):
    """Refused."""


class FusedLion(_Refused):
    """Refused."""


class FusedLamb(_Refused):
    """Refused."""


class OnebitAdam(_Refused):
    """Refused."""

    _instead = "FusedAdam: gradients are reduced in float32, uncompressed"


class OnebitLamb(_Refused):
    """Refused."""


class ZeroOneAdam(_Refused):
    """Refused."""


class ZenFlowCPUAdam(_Refused):
    """Refused."""

    _instead = "DeepSpeedCPUAdam: its step overlaps with backward and the next forward, exactly"
