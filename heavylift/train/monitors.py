"""The monitors of `heavylift train` (`train.report_to`): where they write, and the names of what they get.

The x of every event is the optimizer step. Left out: the sinks (`heavylift.monitor`) and DeepSpeed's event names.
"""

from __future__ import annotations

import os
from typing import Any

from heavylift.config.deepspeed.settings import MonitorSettings
from heavylift.config.schema import Recipe
from heavylift.monitor.events import Event
from heavylift.monitor.master import MonitorMaster
from heavylift.train.metrics import EvalMetrics, StepMetrics

PROJECT = "heavylift"


def recipe_monitors(recipe: Recipe) -> tuple[MonitorSettings, ...]:
    """What `train.report_to` asks for, in the run folder where it is files.

    WANDB_PROJECT and COMET_PROJECT_NAME win over our own project name.
    """
    folder, name = recipe.output_dir, recipe.run_name
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"output_path": str(folder), "job_name": "tensorboard"},
        "csv": {"output_path": str(folder), "job_name": "csv"},
        "wandb": {
            "project": os.environ.get("WANDB_PROJECT", PROJECT),
            "name": name,
            "folder": folder,
            "config": recipe.model_dump(mode="json"),
        },
        "comet": {
            "project": os.environ.get("COMET_PROJECT_NAME", PROJECT),
            "experiment_name": name,
            # x is the step here, not the sample
            "samples_log_interval": 1,
        },
    }
    return tuple(MonitorSettings(kind, options[kind]) for kind in recipe.train.report_to)


def open_monitors(recipe: Recipe) -> MonitorMaster:
    """The monitors of a run, on the rank that reports. Raises UserError where one cannot be opened."""
    return MonitorMaster(recipe_monitors(recipe), enabled=True)


def metrics_events(metrics: StepMetrics | EvalMetrics) -> list[Event]:
    """Events of a step or of an evaluation."""
    if isinstance(metrics, EvalMetrics):
        values = {"eval/loss": metrics.eval_loss}
    else:
        values = {
            "train/loss": metrics.loss,
            "train/grad_norm": metrics.grad_norm,
            "train/learning_rate": metrics.lr,
            "perf/tflops": metrics.tflops,
            "perf/tokens_per_sec": metrics.tokens_per_s,
        }
    return [(name, value, metrics.step) for name, value in values.items()]
