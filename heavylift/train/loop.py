"""The training loop: step, report, evaluate; at the end the model folder and the loss picture.

For who else wants to know (`heavylift.train.bench`), rank 0 keeps what it reported as a `History`.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich import get_console

from heavylift.checkpoint.huggingface import save_model
from heavylift.collective_waits import CollectiveWaits
from heavylift.config.recipe import dump_recipe
from heavylift.config.schema import Recipe, StateFormat, Tier
from heavylift.data.report import report_lines
from heavylift.errors import UserError
from heavylift.files import Room
from heavylift.memory.plan import MemoryPlan
from heavylift.monitor.master import MonitorMaster
from heavylift.offload.options import TieredOptions
from heavylift.train.flops import ModelShape
from heavylift.train.metrics import (
    EvalMetrics,
    MetricsWriter,
    StepMetrics,
    eval_line,
    read_metrics,
    step_line,
)
from heavylift.train.monitors import metrics_events, open_monitors
from heavylift.train.plot import plot_loss
from heavylift.train.preflight import model_folder_bytes
from heavylift.train.progress import Progress, RunSummary, banner, end_summary
from heavylift.train.schedules import build_scheduler
from heavylift.train.setup import Run
from heavylift.train.step_metrics import StepMeasure
from heavylift.train.trace import Tracer
from heavylift.train.waits import StepWaits, WaitWatch, take_waits, waits_text
from heavylift.transfer import RankNumbers


@dataclass
class History:
    """What rank 0 reported of a run."""

    steps: list[StepMetrics] = field(default_factory=list)
    waits: list[StepWaits] = field(default_factory=list)
    """One per step; empty without a host tier."""
    first_step_unix_s: float = 0.0
    """When the first step began, seconds since 1970."""


def train(run: Run) -> History:
    """Trains as the recipe says and leaves the run folder: model/, metrics.jsonl, loss.png, config.yaml.

    With a host tier also waits.jsonl, with `train.profile` trace.json. The history is empty on ranks other than 0.
    """
    folder = run.recipe.output_dir
    history = History()
    room = None
    if run.ranks.rank == 0:
        write_config(run.recipe, folder)
        if run.recipe.export.save:
            # others may fill the disk meanwhile: a model without a place to be written to would be lost
            room = Room(folder, model_folder_bytes(run.recipe, run.num_params))
        for line in report_lines(run.data.samples.report):
            get_console().print(line, soft_wrap=True)
        print(banner(_summary(run)), flush=True)
        with ExitStack() as stack:
            writer = stack.enter_context(MetricsWriter(folder / "metrics.jsonl"))
            waits = (
                stack.enter_context(MetricsWriter(folder / "waits.jsonl"))
                if run.engine.optimizer.options.has_host_tier
                else None
            )
            monitors = stack.enter_context(open_monitors(run.recipe))
            progress = stack.enter_context(Progress(run.data.num_steps))
            _steps(run, Reporter(writer, waits, progress, monitors, run.recipe.train.logging_steps, history))
    else:
        _steps(run, None)
    if room is not None:
        room.release()
    finish(run, folder)
    return history


def write_config(recipe: Recipe, folder: Path) -> None:
    """Makes the run folder, with its config.yaml. Raises UserError for a disk that refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{error.filename or folder / 'config.yaml'}: cannot be written: {error.strerror}; free the disk or choose "
            "another train.output_dir"
        ) from None


@dataclass
class Reporter:
    """Rank 0's mouth: metrics files and screen."""

    writer: MetricsWriter
    waits_writer: MetricsWriter | None
    progress: Progress
    monitors: MonitorMaster
    logging_steps: int
    history: History

    def step(self, metrics: StepMetrics, waits: StepWaits | None, is_last: bool) -> None:
        """One optimizer step is done."""
        self.writer.write(metrics)
        self.history.steps.append(metrics)
        self.monitors.write_events(metrics_events(metrics))
        offload = ""
        if waits is not None and self.waits_writer is not None:
            self.waits_writer.write(waits)
            self.history.waits.append(waits)
            offload = waits_text(waits)
        self.progress.advance()
        if is_last or metrics.step == 1 or metrics.skipped or metrics.step % self.logging_steps == 0:
            self.progress.print(step_line(metrics, offload))

    def evaluation(self, metrics: EvalMetrics) -> None:
        """One evaluation is done."""
        self.writer.write(metrics)
        self.monitors.write_events(metrics_events(metrics))
        self.progress.print(eval_line(metrics))


def _steps(run: Run, reporter: Reporter | None) -> None:
    plan, engine, optimizer = run.data.train, run.engine, run.engine.optimizer
    num_steps = run.data.num_steps
    watch = WaitWatch(optimizer.worker_threads)
    tracer = None
    if run.recipe.train.profile and reporter is not None:
        tracer = Tracer(run.recipe.output_dir / "trace.json", num_steps, optimizer.worker_threads)
    scheduler = build_scheduler(engine.optimizer, num_steps, run.recipe.train)
    shape = ModelShape.from_config(run.hf_config.to_dict(), run.num_params)
    recomputes = run.recipe.train.recomputes_everything
    numbers = RankNumbers(run.ranks.device)
    collectives = CollectiveWaits(engine.sharded, run.ranks.device)
    measure = StepMeasure(plan, shape, run.num_params, recomputes, numbers, collectives)
    _evaluate(run, 0, reporter)
    if reporter is not None:
        reporter.history.first_step_unix_s = time.time()
    start_s, paused = 0.0, True
    for step in range(num_steps):
        if (tracer is not None and tracer.begin_step(step + 1)) or paused:
            start_s = time.perf_counter()
            collectives.take_s()  # of an evaluation
        batches = plan.micro_batches(step, run.ranks.rank)
        lr = float(engine.optimizer.param_groups[0]["lr"])
        result = engine.train_step(batches, plan.num_trained_tokens(step))
        scheduler.step()
        # from the end of one step to that of the next, with the reporting between them: the device still works on a
        # step whose norm is known, so this is what a step takes in the long run
        stop_s = time.perf_counter()
        step_s, start_s = stop_s - start_s, stop_s
        ranges = optimizer.timeline.take()
        paused = False
        try:
            paused = tracer is not None and tracer.end_step(step + 1, ranges, optimizer.take_thread_spans())
        except (OSError, ValueError) as error:  # of the disk; of JSON of which torch has written a part
            tracer, paused = None, True  # it would keep the ranges of all later steps
            _tell(run.recipe.output_dir / "trace.json", error)
        waits = take_waits(watch, step + 1, optimizer, ranges, numbers)
        metrics = measure.of_step(step, batches, result.loss, result.grad_norm, lr, step_s)
        if reporter is not None:
            reporter.step(metrics, waits, step == num_steps - 1)
        every = run.recipe.train.eval_steps
        if step == num_steps - 1 or (every is not None and (step + 1) % every == 0):
            _evaluate(run, step + 1, reporter)
            paused = True


def _tell(path: Path, error: OSError | ValueError) -> None:
    """Of a picture that cannot be written: the run is worth more. Half of one is removed."""
    reason = error.strerror if isinstance(error, OSError) else "only a part of it was written"
    print(f"{path}: cannot be written: {reason}; the run goes on without it", file=sys.stderr, flush=True)
    for left in (path, path.with_name(f"{path.name}.tmp")):  # torch writes that one
        left.unlink(missing_ok=True)


def _evaluate(run: Run, step: int, reporter: Reporter | None) -> None:
    plan = run.data.evaluation
    if plan is None:
        return
    batches = (batch for k in range(plan.steps_per_epoch) for batch in plan.micro_batches(k, run.ranks.rank))
    num_trained = sum(plan.num_trained_tokens(k) for k in range(plan.steps_per_epoch))
    loss = run.engine.evaluate(batches, num_trained)
    if reporter is not None:
        reporter.evaluation(EvalMetrics(step, loss))


def _states(options: TieredOptions, plan: MemoryPlan) -> str:
    """How the optimizer's states are stored and, on the host, who steps them."""
    said = {
        StateFormat.FP32: "masters and moments float32",
        StateFormat.SPLIT: "masters and moments float32 (split)",
        StateFormat.BF16: "masters float32, moments bfloat16",
        StateFormat.INT8: "masters float32, moments int8",
    }[options.state_format]
    if plan.slot_bytes > 0:
        said += f", {options.streamed_share:.0%} of the host's streamed through the GPU"
    return said


def _summary(run: Run) -> RunSummary:
    recipe = run.recipe
    return RunSummary(
        model=recipe.model.model_name_or_path,
        num_params=run.num_params,
        num_trainable_params=run.num_trainable_params,
        param_dtype=str(run.dtype).removeprefix("torch."),
        states=_states(run.engine.optimizer.options, run.plan),
        micro_batch=recipe.train.per_device_train_batch_size,
        accumulation_steps=recipe.train.gradient_accumulation_steps,
        num_ranks=run.ranks.world_size,
        num_steps=run.data.num_steps,
        zero_stage=recipe.engine.zero_stage,
        optimizer_tier=recipe.engine.offload_optimizer,
        host_ratio=run.engine.optimizer.options.ratio,
        schedule=recipe.engine.schedule,
        planned_bytes={Tier.DEVICE: run.plan.device_bytes, Tier.HOST: run.plan.host_bytes},
        planned_parts=run.plan.rows(),
        device_is_host=run.ranks.device.type == "cpu",
    )


def finish(run: Run, folder: Path) -> None:
    """Saves the model and the picture, says how it went. A collective."""
    run.engine.optimizer.synchronize()
    if run.recipe.export.save:
        save_model(
            run.engine.module,
            folder / "model",
            hf_config=run.hf_config,
            tokenizer=run.tokenizer,
            dtype=run.recipe.export.dtype,
            max_shard_bytes=run.recipe.export.max_shard_bytes,
            layout=run.layout,
            generation_config=run.folder / "generation_config.json",
        )
    if run.ranks.rank == 0:
        try:
            plot_loss(folder / "metrics.jsonl", folder / "loss.png")
        except OSError as error:
            _tell(folder / "loss.png", error)
        where = str(folder / "model") if run.recipe.export.save else "not saved (export.save is false)"
        print(end_summary(read_metrics(folder / "metrics.jsonl"), where), flush=True)
