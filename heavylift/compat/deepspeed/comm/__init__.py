"""torch.distributed by its own names, and `init_distributed`."""

from heavylift.api.comm import *  # noqa: F403
from heavylift.api.comm import __getattr__, init_distributed

from . import comm

__all__ = ["__getattr__", "comm", "init_distributed"]
