"""Steps of one sharded model under several options of the optimizer, one after the other, without building it anew.

    torchrun --nproc-per-node 2 benchmarks/step_variants.py examples/llama_3_1_8b_random.yaml \
        --variants device,0:fp32:speculative,0.5:split:deferred --out variants.json engine.ratio=0.9

Started by `python` alone it is one process.

A variant is `device`, or STREAMED_SHARE:STATE_FORMAT:SCHEDULE[:GRADIENTS_ON] with the recipe's share of the states on
the host.
`speculative` runs with a clipping limit that never strikes, `immediate` without any, the others with one that always
does. Compiling and
starting are paid once, so a variant costs its steps and the page-locking of its memory. The bus is measured first: all
processes at the same time, with copies of 256 MB.

Times are those from the end of one `Engine.train_step` to that of the next; rank 0's are written. The weights go on
from variant to variant: losses are no part of the result. A step has `train.gradient_accumulation_steps` micro-batches.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from command_line import Parser, result_file, whole_number, write_result
from command_line import run as run_command

from heavylift.config.recipe import load_recipe
from heavylift.config.schema import Recipe, Schedule, StateFormat, Tier
from heavylift.engine import Engine
from heavylift.errors import UserError
from heavylift.offload.formats import check_format
from heavylift.offload.options import TieredOptions
from heavylift.train.preflight import check
from heavylift.train.setup import Run, make_optimizer, set_up
from heavylift.train.waits import WaitWatch, seconds_names

NEVER, ALWAYS = 1e6, 1e-6
"""Clipping limits above and below every norm."""
BUS_BYTES, BUS_COPIES = 2**28, 16
GIB = 2**30


@dataclass(frozen=True)
class Batch:
    """One micro-batch: the same random tokens in every step."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--variants", type=lambda text: text.split(","), required=True)
    parser.add_argument("--steps", type=whole_number, default=8)
    parser.add_argument("--warmup", type=int, default=3, help="first steps that the median leaves out")
    parser.add_argument("--out", type=result_file, required=True, help="JSON file, written anew after every variant")
    args = parser.parse_intermixed_args()
    if not 0 <= args.warmup < args.steps:
        parser.error(f"argument --warmup: expected a number from 0 below --steps {args.steps}, got {args.warmup}")
    seen: dict[TieredOptions, str] = {}
    for variant in args.variants:
        try:
            options = options_of(variant, TieredOptions())
        except ValueError as error:
            parser.error(
                f"argument --variants: expected device or SHARE:FORMAT:SCHEDULE[:TIER], got {variant!r}: {error}"
            )
        if options in seen:
            parser.error(f"argument --variants: {variant!r} is {seen[options]!r} again; give each variant once")
        seen[options] = variant
    return args


def options_of(variant: str, base: TieredOptions) -> TieredOptions:
    """The options of a variant. Raises ValueError for what is none."""
    if variant == "device":
        return replace(base, tier=Tier.DEVICE, schedule=Schedule.SYNCHRONOUS, max_grad_norm=ALWAYS)
    parts = variant.split(":")
    if len(parts) not in (3, 4):
        raise ValueError(f"{len(parts)} parts, not three or four")
    share, state_format, schedule = parts[:3]
    return replace(
        base,
        tier=Tier.HOST,
        streamed_share=float(share),
        state_format=StateFormat(state_format),
        schedule=Schedule(schedule),
        gradients_on=Tier(parts[3]) if len(parts) == 4 else base.gradients_on,
        max_grad_norm={Schedule.SPECULATIVE: NEVER, Schedule.IMMEDIATE: 0.0}.get(Schedule(schedule), ALWAYS),
    )


def read_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe, checked as far as can be before anything is built. Raises UserError."""
    recipe = load_recipe(args.recipe, args.overrides)
    check(recipe, owns_output_dir=False)
    if recipe.data.cutoff_len is None:
        raise UserError("data.cutoff_len: expected the length of the random samples, got nothing; set it")
    return recipe


def check_variants(variants: list[str], run: Run) -> None:
    """Raises UserError for those that the model's parameters do not take."""
    problems = []
    for variant in variants:
        try:
            check_format(options_of(variant, TieredOptions()).state_format, {run.dtype})
        except ValueError as error:
            problems.append(f"--variants: {variant}: {error}; take another format, or model.dtype=bfloat16")
    if problems:
        raise UserError(*problems)


def bus_gb_per_s(device: torch.device) -> dict[str, float]:
    """Page-locked copies of this process while all others do the same: up, down, and both directions together."""
    host = [torch.empty(BUS_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(BUS_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    found = {}
    for kind, directions in (("up", (0,)), ("down", (1,)), ("both", (0, 1))):
        torch.cuda.synchronize()
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(BUS_COPIES):
            for direction in directions:
                with torch.cuda.stream(streams[direction]):
                    pair = (there[0], host[0]) if direction == 0 else (host[1], there[1])
                    pair[0].copy_(pair[1], non_blocking=True)
        torch.cuda.synchronize()
        found[kind] = BUS_COPIES * BUS_BYTES * len(directions) / (time.perf_counter() - start_s) / 1e9
    return found


def random_batches(run: Run) -> list[Batch]:
    """This process's micro-batches of a step, as many as the recipe says. All processes have equally many tokens."""
    generator = torch.Generator().manual_seed(run.ranks.rank)
    size = (run.recipe.train.per_device_train_batch_size, run.recipe.data.cutoff_len)
    batches = []
    for _ in range(run.recipe.train.gradient_accumulation_steps):
        ids = torch.randint(0, int(run.hf_config.vocab_size), size, generator=generator)
        batches.append(Batch(ids, ids.clone()))
    return batches


def measure(run: Run, options: TieredOptions, batches: list[Batch], num_steps: int, num_warmup: int) -> dict[str, Any]:
    """Steps of one variant. A collective."""
    train, sharded, device = run.recipe.train, run.engine.sharded, run.ranks.device
    on_gpu = device.type == "cuda"
    start_s = time.perf_counter()
    optimizer = make_optimizer(sharded, train, options)
    built_s = time.perf_counter() - start_s
    engine, watch, steps = Engine(sharded, optimizer, device), WaitWatch(optimizer.worker_threads), []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    num_trained = sum(batch.labels.numel() for batch in batches) * run.ranks.world_size
    dist.barrier()
    start_s = time.perf_counter()
    for step in range(num_steps):
        engine.train_step(batches, num_trained)
        # from the end of one step to that of the next: nothing here makes the device idle between them
        stop_s = time.perf_counter()
        step_s, start_s = stop_s - start_s, stop_s
        gate_device_s = optimizer.take_device_gate_s()
        waits = watch.step(step + 1, optimizer.last_schedule, optimizer.timeline.take(), gate_device_s)
        seconds = {name: round(getattr(waits, name), 4) for name in seconds_names()}
        steps.append({"step_s": round(step_s, 4), "schedule": waits.schedule, "hidden": waits.hidden, **seconds})
    found = {
        "step_s": statistics.median(step["step_s"] for step in steps[num_warmup:]),
        "built_s": round(built_s, 1),
        "peak_device_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if on_gpu else None,
        "host_gib": round(optimizer.usage.host_bytes / GIB, 2),
        "pinned_gib": round(optimizer.usage.pinned_bytes / GIB, 2),
        "steps": steps,
    }
    optimizer.close()
    return found


def main() -> int:
    """All variants."""
    args = arguments()
    run = set_up(read_recipe(args))
    check_variants(args.variants, run)
    base, batches = run.engine.optimizer.options, random_batches(run)
    run.engine.optimizer.close()
    # the run is frozen, its engine is not: nothing else may hold the states of the first optimizer
    run.engine.optimizer = None  # type: ignore[assignment]
    on_gpu = run.ranks.device.type == "cuda"
    result: dict[str, Any] = {
        "recipe": args.recipe,
        "overrides": args.overrides,
        "num_processes": run.ranks.world_size,
        "micro_batches": len(batches),
        "tokens_per_step": sum(batch.input_ids.numel() for batch in batches) * run.ranks.world_size,
        "ratio": base.ratio,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "torch": torch.__version__,
        "bus_gb_per_s": bus_gb_per_s(run.ranks.device) if on_gpu else None,
        "variants": {},
    }
    for variant in args.variants:
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        found = measure(run, options_of(variant, base), batches, args.steps, args.warmup)
        result["variants"][variant] = found
        if run.ranks.rank == 0:
            print(f"{variant:<28} {found['step_s']:.3f} s, device {found['peak_device_gib']} GiB", flush=True)
            write_result(args.out, json.dumps(result, indent=1) + "\n")
    dist.barrier()
    # as heavylift's own processes leave: see `heavylift.launch.entry.leave`
    os._exit(0)


if __name__ == "__main__":
    run_command(main)
