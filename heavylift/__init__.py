"""heavylift: trains models that do not fit. `heavylift.initialize(...)` returns an engine; see docs/deepspeed.md.

The public names are looked up when they are first used: the command line imports this package, and must answer before
torch could have been imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "DeepSpeedCPUAdam": "heavylift.api.optimizers",
    "DeepSpeedConfig": "heavylift.api.config_object",
    "Engine": "heavylift.api.engine",
    "DeepSpeedEngine": "heavylift.api.engine:Engine",
    "FusedAdam": "heavylift.api.optimizers",
    "OnDevice": "heavylift.api.on_device",
    "UserError": "heavylift.errors",
    "DeepSpeedConfigError": "heavylift.errors:UserError",
    "add_config_arguments": "heavylift.api.arguments",
    "get_accelerator": "heavylift.api.accelerator",
    "init_distributed": "heavylift.api.distributed",
    "initialize": "heavylift.api.initialize",
}
"""Public name -> module, or module:name where it has another name there."""
_MODULES = {
    "checkpointing": "heavylift.api.activation_checkpointing",
    "comm": "heavylift.api.comm",
    "ops": "heavylift.api.ops",
    "utils": "heavylift.api.utils",
    "zero": "heavylift.api.zero",
}
"""Public names that are modules."""

__all__ = [
    "DeepSpeedCPUAdam",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "Engine",
    "FusedAdam",
    "OnDevice",
    "UserError",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, other = home.partition(":")
    value = getattr(import_module(module), other or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
