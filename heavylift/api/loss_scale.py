"""Loss scale of float16 training: the loss is multiplied by it before backward, the gradients are divided by it again.

Dynamic: an overflow (a gradient that is not finite) takes a life; without lives left the scale halves. After
`window` steps without overflow it doubles. The rules are those of DeepSpeed's dynamic scaler, in every stage.
"""

from __future__ import annotations

from typing import Any

from heavylift.config.deepspeed.settings import LossScale
from heavylift.errors import UserError

FACTOR = 2.0


class LossScaler:
    """The scale of the coming step. Without settings it is 1 and never moves."""

    def __init__(self, settings: LossScale | None) -> None:
        self._settings = settings
        self.scale = 1.0
        """The loss is multiplied by this."""
        if settings is not None:
            self.scale = settings.initial_scale if settings.static_scale is None else settings.static_scale
        self._lives = 1 if settings is None else settings.hysteresis
        self._num_updates = 0
        self._last_overflow = -1

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale can move."""
        return self._settings is not None and self._settings.static_scale is None

    @property
    def loss_scale(self) -> float:
        """`scale`, by the name that scripts for DeepSpeed look for."""
        return self.scale

    @property
    def cur_scale(self) -> float:
        """`scale`, by DeepSpeed's other name for it."""
        return self.scale

    @property
    def dynamic(self) -> bool:
        """`is_dynamic`, by DeepSpeed's name."""
        return self.is_dynamic

    def update(self, overflow: bool) -> None:
        """After a step: `overflow` where it was skipped because a gradient was not finite.

        Raises UserError for an overflow that finds the scale at its minimum and no lives left: the run diverges.
        """
        settings = self._settings
        if settings is None or settings.static_scale is not None:
            return
        if overflow:
            self._overflowed(settings)
        else:
            self._passed(settings)
        self._num_updates += 1

    def _overflowed(self, settings: LossScale) -> None:
        self._last_overflow = self._num_updates
        if self._lives > 1:
            self._lives -= 1
            return
        if self.scale <= settings.min_scale:
            raise UserError(
                f"fp16: a gradient is not finite at the smallest loss scale ({self.scale:g}): the run diverges; lower "
                "the learning rate, use bf16, or lower fp16.min_loss_scale"
            )
        self.scale = max(self.scale / FACTOR, settings.min_scale)

    def _passed(self, settings: LossScale) -> None:
        if settings.consecutive_hysteresis:
            self._lives = settings.hysteresis
        if (self._num_updates - self._last_overflow) % settings.window == 0:
            self._lives = settings.hysteresis
            self.scale *= FACTOR

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "scale": self.scale,
            "lives": self._lives,
            "num_updates": self._num_updates,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken; a static scale stays as it is configured."""
        if not self.is_dynamic:
            return
        self.scale, self._lives = float(state["scale"]), int(state["lives"])
        self._num_updates, self._last_overflow = int(state["num_updates"]), int(state["last_overflow"])
