"""DeepSpeed's names, all of them heavylift's own: `import deepspeed` resolves here after `heavylift.compat.install()`.

Modules here re-export and nothing else. What each name comes to: docs/deepspeed_api.md.
"""

from heavylift.api.accelerator import get_accelerator
from heavylift.api.arguments import add_config_arguments
from heavylift.api.config_object import DeepSpeedConfig
from heavylift.api.dataloader import EngineDataLoader as DeepSpeedDataLoader
from heavylift.api.distributed import init_distributed
from heavylift.api.engine import Engine as DeepSpeedEngine
from heavylift.api.initialize import initialize
from heavylift.api.logs import log_dist, logger
from heavylift.api.lr_arguments import add_tuning_arguments
from heavylift.api.on_device import OnDevice
from heavylift.api.refused import (
    DeepSpeedHybridEngine,
    InferenceEngine,
    PipelineEngine,
    PipelineModule,
    init_inference,
    tp_model_init,
)
from heavylift.errors import UserError as DeepSpeedConfigError

from . import (
    accelerator,
    checkpoint,
    checkpointing,
    comm,
    elasticity,
    launcher,
    moe,
    monitor,
    ops,
    pipe,
    profiling,
    runtime,
    utils,
    zero,
)
from .git_version_info import git_branch as __git_branch__
from .git_version_info import git_hash as __git_hash__
from .git_version_info import version as __version__
from .runtime import activation_checkpointing, lr_schedules

dist = comm

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedHybridEngine",
    "InferenceEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "__git_branch__",
    "__git_hash__",
    "__version__",
    "accelerator",
    "activation_checkpointing",
    "add_config_arguments",
    "add_tuning_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "dist",
    "elasticity",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "launcher",
    "log_dist",
    "logger",
    "lr_schedules",
    "moe",
    "monitor",
    "ops",
    "pipe",
    "profiling",
    "runtime",
    "tp_model_init",
    "utils",
    "zero",
]
