"""`offload_states` and `reload_states`: the device's memory for something else between two steps, as for generation."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import torch

from heavylift.api.engine_steps import EngineSteps
from heavylift.config.words import shown
from heavylift.errors import UserError
from heavylift.memory.refusal import host_memory_for
from heavylift.offload.optimizer import TieredAdamW
from heavylift.offload.parking import ParkedStates
from heavylift.offload.tensors import MOMENTS

logger = logging.getLogger(__name__)


class OffloadStateTypeEnum(StrEnum):
    """What `offload_states` may be asked for, by DeepSpeed's names."""

    optim_states = "optim_states"
    """The moments."""
    hp_params = "hp_params"
    """The masters."""
    lp_params = "lp_params"
    """The parameters: they stay."""
    lp_grads = "lp_grads"
    """Gradients: they stay, and after step() there are none."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """There is none."""


class OffloadDeviceEnum(StrEnum):
    """Where to, by DeepSpeed's names."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class EngineOffload(EngineSteps):
    """The part of an engine that clears the device."""

    _parked: ParkedStates | None = None

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves masters and moments of AdamW that lie on the device to the host, until `reload_states`. No bit changes.

        `include`: which of `OffloadStateTypeEnum`; None: all. Parameters stay. `pin_memory`: page-locked, which takes
        longer here and less at `reload_states`. It returns when the copies are done, whatever `non_blocking`. States
        can be read, set and saved meanwhile; a forward with gradients and a step raise. Raises UserError between
        backward and step(), for other optimizers, for `nvme`, and where the host refuses memory.
        """
        names = _states_of(include)
        if device not in tuple(OffloadDeviceEnum):
            raise UserError(f'offload_states: device= should be "cpu", got {shown(device)}')
        if device == OffloadDeviceEnum.nvme:
            raise UserError('offload_states: device="nvme" is not supported; take "cpu"')
        if device == OffloadDeviceEnum.none:
            return
        super().check_whole()
        optimizer = self.needs_optimizer("offload_states")
        if not isinstance(optimizer, TieredAdamW):
            raise UserError(
                f"offload_states: {type(optimizer.inner).__name__} keeps its states on the device; only those of Adam "
                "and AdamW can be moved"
            )
        if self._num_backwards > 0:
            raise UserError("offload_states: called between backward and step(), which needs the states; call it after")
        self.settle()
        self._parked = self._parked or ParkedStates(optimizer)
        with host_memory_for("the states", "offload_states", "leave them on the device, or pin_memory=False"):
            self._parked.put_away(names, pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undoes `offload_states`; nothing to do where nothing is away. It returns when the copies are done."""
        if self._parked is None:
            return
        try:
            self._parked.bring_back()
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"reload_states: the device has no room for the states ({str(error).splitlines()[0]}); free what was "
                "allocated since offload_states()"
            ) from None

    def check_whole(self) -> None:
        """Before forward and step. Raises UserError too where states that a step needs are away."""
        super().check_whole()
        if torch.is_grad_enabled() and self._parked is not None and self._parked.names:
            raise UserError(
                "engine: its optimizer states are on the host since offload_states(); call engine.reload_states() "
                "before it trains again, and evaluate under torch.no_grad()"
            )


def _states_of(include: Any) -> set[str]:
    """Names of the optimizer's states."""
    known = tuple(OffloadStateTypeEnum)
    if include is None:
        return {"master", *MOMENTS}
    if isinstance(include, str) or not isinstance(include, (list, tuple, set, frozenset)):
        raise UserError(f"offload_states: include= should be a list of {', '.join(known)}, got {shown(include)}")
    unknown = [one for one in include if one not in known]
    if unknown:
        raise UserError(f"offload_states: include= knows {', '.join(known)}, not {shown(unknown[0])}")
    names: set[str] = set()
    for one in include:
        if one == OffloadStateTypeEnum.optim_states:
            names |= set(MOMENTS)
        elif one == OffloadStateTypeEnum.hp_params:
            names.add("master")
        else:
            logger.warning("offload_states: %s has no effect: parameters and gradients stay on the device", str(one))
    return names
