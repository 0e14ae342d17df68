"""Rows for the custom module, and what a call refuses."""

from __future__ import annotations

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


def rows(num: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [num, 5] that differ from rank to rank, and targets [num, 1]."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(num, 5, generator=generator).to(dtype), torch.zeros(num, 1, dtype=dtype)
