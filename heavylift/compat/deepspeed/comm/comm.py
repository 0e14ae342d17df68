"""torch.distributed by its own names, and `init_distributed`."""

from heavylift.api.comm import __getattr__, init_distributed

__all__ = ["__getattr__", "init_distributed"]
