"""heavylift: trains models that do not fit. `heavylift.initialize(...)` returns an engine; see docs/deepspeed.md.

The public names are looked up when they are first used: the command line imports this package, and must answer before
torch could have been imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Engine": "heavylift.api.engine",
    "UserError": "heavylift.errors",
    "initialize": "heavylift.api.initialize",
    "init_distributed": "heavylift.api.distributed",
    "add_config_arguments": "heavylift.api.arguments",
    "DeepSpeedCPUAdam": "heavylift.api.optimizers",
    "FusedAdam": "heavylift.api.optimizers",
}
"""Public name -> its module."""
_DEEPSPEED = frozenset(
    """
    DeepSpeedConfig DeepSpeedConfigError DeepSpeedDataLoader DeepSpeedEngine DeepSpeedHybridEngine InferenceEngine
    OnDevice PipelineEngine PipelineModule accelerator activation_checkpointing add_tuning_arguments checkpointing comm
    dist elasticity get_accelerator init_inference log_dist logger lr_schedules moe ops pipe profiling runtime
    tp_model_init utils zero
    """.split()
)
"""Names that `import heavylift as deepspeed` gives beside those, the very objects of `heavylift.compat.deepspeed`: both
imports know the same. Left out are its `checkpoint`, `launcher` and `monitor`: two are names of packages of ours."""

__all__ = [*_HOMES, *sorted(_DEEPSPEED)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in _DEEPSPEED:
        value = getattr(import_module("heavylift.compat.deepspeed"), name)
    else:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; docs/deepspeed_api.md lists the names of DeepSpeed's that "
            "are here, and how deeper modules are imported"
        )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_DEEPSPEED})
