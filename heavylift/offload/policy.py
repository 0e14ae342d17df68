"""Which schedule the next step takes, from the norms of the last ones."""

from __future__ import annotations

from heavylift.config.schema import Schedule

CALM_STEPS = 4
"""`auto` speculates after so many steps in a row without clipping."""
CALM_SHARE = 0.9
"""...and while the last norm stays below this share of the limit: a correction costs as much as a step."""


class SchedulePolicy:
    """Fixed schedules stay what they are; `auto` speculates while clipping does not strike."""

    def __init__(self, schedule: Schedule, max_grad_norm: float) -> None:
        self._schedule = schedule
        self._limit = max_grad_norm
        self._num_calm = 0
        self._last_norm = 0.0

    @property
    def speculates(self) -> bool:
        """Whether the next step is taken during backward."""
        if self._schedule is not Schedule.AUTO:
            return self._schedule in (Schedule.SPECULATIVE, Schedule.IMMEDIATE)
        if self._limit == 0:
            return True
        return self._num_calm >= CALM_STEPS and self._last_norm < CALM_SHARE * self._limit

    def observe(self, grad_norm: float, struck: bool) -> None:
        """The norm of a step, and whether it was clipped or skipped."""
        self._num_calm = 0 if struck else self._num_calm + 1
        self._last_norm = grad_norm
