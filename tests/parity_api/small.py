"""Rows for the custom module, what a call refuses, and what it warns of."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from heavylift.errors import UserError


def message_of(action: Any) -> str:
    """The UserError that `action()` raises, as text."""
    with pytest.raises(UserError) as raised:
        action()
    return str(raised.value)


def warnings_of(action: Any) -> list[str]:
    """What the package logs meanwhile."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("heavylift")
    logger.addHandler(handler)
    try:
        action()
    finally:
        logger.removeHandler(handler)
    return told


def rows(num: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [num, 5] that differ from rank to rank, and targets [num, 1]."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(num, 5, generator=generator).to(dtype), torch.zeros(num, 1, dtype=dtype)
