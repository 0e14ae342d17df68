"""The loss scale by the names that scripts for DeepSpeed look for at an optimizer: `loss_scale`, `cur_scale`,
`loss_scaler`. What moves the scale, and tells the optimizer what gradients carry, is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class HasScale(Protocol):
    """A scaler: the loss of the coming step is multiplied by `scale`."""

    @property
    def scale(self) -> float:
        """The factor."""
        ...


@dataclass(frozen=True)
class Unscaled:
    """Of an optimizer without an engine."""

    scale: float = 1.0


class TellsLossScale:
    """For an optimizer: reads the scale of the engine that steps it."""

    loss_scaler: HasScale = Unscaled()
    """The engine's, from when it is made."""

    @property
    def loss_scale(self) -> float:
        """The loss of the coming step is multiplied by this; 1 without float16."""
        return self.loss_scaler.scale

    @property
    def cur_scale(self) -> float:
        """`loss_scale`."""
        return self.loss_scaler.scale
