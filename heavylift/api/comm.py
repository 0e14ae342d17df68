"""`deepspeed.comm`: torch.distributed by its own names, and `init_distributed`."""

from typing import Any

import torch.distributed
from torch.distributed import *  # noqa: F403

from heavylift.api.distributed import init_distributed

__all__ = ["init_distributed"]


def __getattr__(name: str) -> Any:
    return getattr(torch.distributed, name)
