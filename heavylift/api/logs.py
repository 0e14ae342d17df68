"""`deepspeed.utils.logging`: the logger by its names, and lines from one rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from heavylift.errors import UserError


def _make_logger() -> logging.Logger:
    made = logging.getLogger("heavylift.script")
    if not made.handlers:
        # scripts expect to see what they log, whether or not they have set logging up
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.INFO)
        made.propagate = False
    return made


logger = _make_logger()

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks, with the rank in front; None or -1: on all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def print_rank_0(message: str) -> None:
    """Prints on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """By name. Raises UserError for an unknown one."""
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise UserError(f"log level: expected one of {', '.join(log_levels)}, got {log_level_str!r}")
    (custom_logger or logger).setLevel(level)


def get_current_level() -> int:
    """Of the logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the logger lets through at least what this level names."""
    return get_current_level() <= log_levels[max_log_level_str.lower()]
