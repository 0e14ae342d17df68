"""The result of `heavylift bench`: one JSON file about a run that has just been trained.

`result` computes it, `write_result` writes it (a collective: page-locked memory is summed over the processes). Speeds
come from the median step after warm-up; every step is there too, with what it waited for. A value that is not finite
is null. Left out: timing (the loop does it) and comparing results.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heavylift.config.schema import Tier
from heavylift.errors import UserError
from heavylift.files import replacing
from heavylift.train.bench_request import BenchRequest
from heavylift.train.loop import History
from heavylift.train.machine_facts import machine_facts, version_facts
from heavylift.train.metrics import StepMetrics
from heavylift.train.setup import Run
from heavylift.train.waits import StepWaits, seconds_names
from heavylift.units import GIB

FORMAT = 1
"""Of the file; raised when a key changes its meaning or goes."""


def write_result(run: Run, history: History, request: BenchRequest) -> None:
    """Writes the file on rank 0. Raises UserError when it cannot be written."""
    pinned = torch.tensor(float(run.engine.optimizer.usage.pinned_bytes), dtype=torch.float64, device=run.ranks.device)
    dist.all_reduce(pinned)
    if run.ranks.rank != 0:
        return
    text = json.dumps(finite(result(run, history, request, float(pinned) / GIB)), indent=1, allow_nan=False) + "\n"
    path = Path(request.path)
    try:
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); change --out or --name") from None


def result(run: Run, history: History, request: BenchRequest, pinned_gib: float) -> dict[str, Any]:
    """What the file holds; keys with a unit end in it."""
    measured = history.steps[request.num_warmup_steps :]
    return {
        "format": FORMAT,
        "name": request.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "versions": version_facts(),
        "model": _model(run),
        "setup": _setup(run),
        # without the run folder, which was a temporary one
        "recipe": run.recipe.model_dump(mode="json", exclude={"train": {"output_dir", "overwrite_output_dir"}}),
        "num_steps": len(history.steps),
        "num_warmup_steps": request.num_warmup_steps,
        **speeds(measured),
        "start_to_first_step_s": history.first_step_unix_s - request.started_unix_s,
        "first_step_s": history.steps[0].step_s,
        "peak_device_gib": max(step.mem_device_gib for step in history.steps),
        "peak_host_gib": max(step.mem_host_gib for step in history.steps),
        "pinned_gib": pinned_gib,
        "collective_wait_s": statistics.median(step.collective_wait_s for step in measured),
        "offload": offload_summary(history.waits[request.num_warmup_steps :]),
        "steps": _steps(run, history),
    }


def speeds(steps: Sequence[StepMetrics]) -> dict[str, Any]:
    """Statistics over steps; tokens/s and TFLOPS (per process) are those of a step of the median length."""
    seconds = [step.step_s for step in steps]
    median = statistics.median(seconds)
    return {
        "step_s": spread(seconds),
        "tokens_per_s": statistics.median(step.tokens for step in steps) / median,
        "tflops": statistics.median(step.tflops * step.step_s for step in steps) / median,
        "model_tflops": statistics.median(step.model_tflops * step.step_s for step in steps) / median,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and the middle half."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": median, "min": min(values), "max": max(values), "q1": q1, "q3": q3}


def offload_summary(waits: Sequence[StepWaits]) -> dict[str, Any] | None:
    """Mean seconds per step of every kind, and the share of all work that was hidden; None without a host tier."""
    if not waits:
        return None
    means = {name: statistics.fmean(getattr(step, name) for step in waits) for name in seconds_names()}
    work_s = sum(step.work_s for step in waits)
    exposed_s = sum(step.exposed_s for step in waits)
    return {"hidden": max(0.0, 1 - exposed_s / work_s) if work_s > 0 else None, **means}


def _steps(run: Run, history: History) -> list[dict[str, Any]]:
    limit = run.recipe.train.max_grad_norm
    waits = {step.step: step for step in history.waits}
    rows = []
    for step in history.steps:
        row: dict[str, Any] = {
            "step": step.step,
            "step_s": step.step_s,
            "collective_wait_s": step.collective_wait_s,
            "loss": step.loss,
            "grad_norm": step.grad_norm,
            "clipped": 0 < limit < step.grad_norm,
            "skipped": step.skipped,
            "schedule": None,
        }
        if step.step in waits:
            row["schedule"] = waits[step.step].schedule
            row["hidden"] = waits[step.step].hidden
            row |= {name: getattr(waits[step.step], name) for name in seconds_names()}
        rows.append(row)
    return rows


def _model(run: Run) -> dict[str, Any]:
    config = run.hf_config.to_dict()
    config = config.get("text_config") or config
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {
        "name": run.recipe.model.model_name_or_path,
        "type": config.get("model_type"),
        "num_params": run.num_params,
        "num_trainable_params": run.num_trainable_params,
        "dtype": str(run.dtype).removeprefix("torch."),
        **{key: config.get(key) for key in (*keys, "vocab_size")},
    }


def _setup(run: Run) -> dict[str, Any]:
    train, engine = run.recipe.train, run.recipe.engine
    on_host = engine.offload_optimizer is Tier.HOST
    return {
        "num_processes": run.ranks.world_size,
        "device": run.ranks.device.type,
        "micro_batch": train.per_device_train_batch_size,
        "accumulation_steps": train.gradient_accumulation_steps,
        "seq": run.recipe.data.cutoff_len,
        "gradient_checkpointing": train.gradient_checkpointing,
        "stage": engine.zero_stage,
        "tier": engine.offload_optimizer.value,
        "ratio": run.engine.optimizer.options.ratio if on_host else 0.0,
        "schedule": engine.schedule.value if on_host else None,
        "state_format": engine.state_format.value,
        "gradients_on": engine.gradients_on.value if on_host else None,
        "streamed_share": engine.streamed_share if on_host else 0.0,
        "max_grad_norm": train.max_grad_norm,
        "cpu_threads": run.engine.optimizer.options.num_threads,
    }


def finite(value: Any) -> Any:
    """The same with None for every number that is not finite, at any depth."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
