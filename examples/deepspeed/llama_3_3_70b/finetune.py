"""Full fine-tuning of a causal language model through `heavylift.initialize`; finetune.sh shows how it is launched.

No rank ever holds the whole model: it is built on the meta device, sharded, and each rank reads (or draws) its slices.
The loss of a step is the mean over its trained tokens, whatever rank and micro-batch they are in.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arguments import check_inputs, check_output, parse_arguments, recipe_of
from data import fetch_dataset, has_tokenizer, make_plan
from placement import Placement
from pydantic import ValidationError
from report import StepReport, wait_for_device
from torch import nn
from words import in_own_words

import heavylift
from heavylift.checkpoint.huggingface import save_model
from heavylift.config.deepspeed.parse import load_settings
from heavylift.config.deepspeed.settings import Settings
from heavylift.config.deepspeed.sources import read_source
from heavylift.config.model_folder import resolve_model_folder
from heavylift.config.schema import Recipe
from heavylift.data.batches import Batch, BatchPlan
from heavylift.engine import parameter_groups, sum_token_losses
from heavylift.errors import EXIT_USER_ERROR, UserError
from heavylift.memory.machine import MachineMemory, agree, measure
from heavylift.models.chunked_loss import Targets
from heavylift.models.load import build_on_meta, load_hf_config, parameter_counts, resolve_dtype
from heavylift.models.loss_head import find_loss_head
from heavylift.ranks import Ranks
from heavylift.train.schedules import build_scheduler
from heavylift.train.setup import prepare_head, prepare_layers
from heavylift.transfer import to_device


def main(argv: list[str] | None = None, machine: MachineMemory | None = None) -> None:
    """Trains as the command line `argv` says, with what `machine` has free; None: what is measured."""
    args = parse_arguments(argv)
    check_inputs(args)
    check_output(args)
    heavylift.init_distributed()
    ranks = Ranks.here()
    say = print if ranks.rank == 0 else _silent
    set_seed(args.seed, args.deterministic)
    settings = read_settings(args, ranks.world_size)
    fetch_dataset(args, ranks.rank)
    recipe = make_recipe(args, settings, say)
    folder = resolve_model_folder(recipe)
    hf_config = load_hf_config(folder, trust_remote_code=False)
    plan, tokenizer = make_plan(
        args,
        recipe,
        hf_config,
        micro_batch=settings.batch.micro_batch,
        accumulation=settings.batch.accumulation,
        world_size=ranks.world_size,
        device_type=ranks.device.type,
    )
    num_steps = plan.num_steps(recipe.train.num_train_epochs, recipe.train.max_steps)
    placement = Placement(recipe, hf_config, settings, ranks, plan.longest)
    machine = agree(measure(ranks.device), ranks.device) if machine is None else machine
    settings, placed = placement.place(machine, fit_ratio=args.fit_ratio)
    if placed is not None:
        say(placed)
    model = build_model(recipe, hf_config, folder, ranks)
    num_params, _ = parameter_counts(model)
    engine, *_ = heavylift.initialize(
        model=model,
        optimizer=torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.lr),
        lr_scheduler=lambda optimizer: build_scheduler(optimizer, num_steps, recipe.train),
        config=settings,
    )
    say(f"{num_params:,} parameters, {num_steps} steps of {settings.batch.train_batch} sequences")
    report = StepReport(recipe, plan, num_steps, hf_config, num_params, engine)
    train(engine, plan, num_steps, report, args.log_interval, say)
    say(report.summary(args.warmup_steps if args.bench_steps else 0))
    report.close()
    save(engine, args, recipe, hf_config, tokenizer, say)
    engine.destroy()
    dist.destroy_process_group()


def _silent(*_: Any, **__: Any) -> None:
    """What ranks other than 0 have to say."""


def set_seed(seed: int, deterministic: bool) -> None:
    """Of torch; the order of the data and random weights have it too."""
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by torch; read at cuBLAS' first use
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def read_settings(args: argparse.Namespace, world_size: int) -> Settings:
    """The ds_config, with what the switches change in it."""
    if args.batch_size is None and not args.leaf_module:
        return load_settings(args.deepspeed_config, world_size)  # a problem is then told with its line
    config = read_source(args.deepspeed_config).values
    if args.batch_size is not None:
        config = {key: value for key, value in config.items() if key != "train_batch_size"}
        config["train_micro_batch_size_per_gpu"] = args.batch_size
    if args.leaf_module:
        block = dict(config.get("zero_optimization", {}))
        config["zero_optimization"] = {**block, "leaf_module": {"classes": args.leaf_module}}
    return load_settings(config, world_size)


def make_recipe(args: argparse.Namespace, settings: Settings, say: Any) -> Recipe:
    """The switches as a recipe; says plainly what is random. Raises UserError for data without a tokenizer."""
    folder = Path(args.model_name).expanduser()
    has_weights = not folder.is_dir() or any(folder.glob("*.safetensors"))
    tokenizer_name = args.tokenizer_name or args.model_name
    tokenizes = has_tokenizer(tokenizer_name)
    if not tokenizes and args.dataset is not None:
        raise UserError(f"{tokenizer_name}: no tokenizer, which --dataset needs; give --tokenizer_name")
    if not has_weights:
        say(f"RANDOM WEIGHTS: no *.safetensors in {folder}; speed and memory are real, the model learns nothing useful")
    if not tokenizes:
        say(f"RANDOM TOKENS: no tokenizer in {folder}; every sample has {args.max_length} of them")
    try:
        return recipe_of(
            args, has_weights=has_weights, has_tokenizer=tokenizes, rows_per_step=settings.batch.train_batch
        )
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']}" for e in error.errors()]
        remedy = "lower the batch size, --bench_steps or --num_train_epochs"
        raise UserError(*(f"{line}; {remedy}" for line in lines)) from None


def build_model(recipe: Recipe, hf_config: Any, folder: Path, ranks: Ranks) -> nn.Module:
    """The model on the meta device: chunked loss, checkpointing and compilation ready, weights named, not read."""
    model = build_on_meta(hf_config, recipe.model, resolve_dtype("bfloat16", ranks.device.type))
    prepare_head(model, recipe.train, ranks.rank)
    prepare_layers(model, recipe.train, ranks.device)
    if recipe.model.init == "pretrained":
        heavylift.zero.set_weights_source(model, folder)
    else:
        std = float(getattr(hf_config, "initializer_range", 0.02))
        heavylift.zero.set_weights_source(model, heavylift.zero.RandomWeights(std, recipe.train.seed))
    return model


def train(
    engine: heavylift.Engine, plan: BatchPlan, num_steps: int, report: StepReport, log_interval: int, say: Any
) -> None:
    """All steps. A step that is on its way to the GPU while the next one begins counts for that next one."""
    engine.train()
    for step in range(num_steps):
        batches = plan.micro_batches(step, dist.get_rank())
        num_trained = plan.num_trained_tokens(step)
        lr = engine.get_lr()[0]
        loss_sum = torch.zeros((), device=engine.device)
        wait_for_device()
        start_s = time.perf_counter()
        for batch in batches:
            batch_sum = sum_losses(engine, batch)
            # the engine takes the mean over ranks and micro-batches
            engine.backward(batch_sum * (engine.world_size * len(batches) / num_trained))
            engine.step()
            loss_sum += batch_sum.detach()
        wait_for_device()
        step_s = time.perf_counter() - start_s
        dist.all_reduce(loss_sum)
        grad_norm = engine.get_global_grad_norm()
        assert grad_norm is not None
        line = report.step(step, batches, loss_sum.item() / num_trained, grad_norm, lr, step_s)
        if step % log_interval == 0 or step == num_steps - 1:
            say(line, flush=True)


def sum_losses(engine: heavylift.Engine, batch: Batch) -> torch.Tensor:
    """Sum of the cross-entropies over the batch's trained tokens, a float32 scalar."""
    input_ids = to_device(batch.input_ids, engine.device)
    head = find_loss_head(engine.module)
    if head is not None:
        return head.loss_sum(engine, input_ids, Targets.of(batch.labels, engine.device))
    logits = engine(input_ids=input_ids, use_cache=False).logits
    return sum_token_losses(logits, to_device(batch.labels, engine.device))


def save(
    engine: heavylift.Engine, args: argparse.Namespace, recipe: Recipe, hf_config: Any, tokenizer: Any, say: Any
) -> None:
    """What the switches ask for. A collective."""
    folder = Path(args.output_dir)
    if args.save_checkpoint:
        engine.save_checkpoint(str(folder / "checkpoint"))
        say(f"checkpoint: {folder / 'checkpoint'}")
    if args.save_model:
        engine.settle()
        export = recipe.export
        save_model(
            engine.module,
            folder / "model",
            hf_config=hf_config,
            tokenizer=tokenizer,
            dtype=export.dtype,
            max_shard_bytes=export.max_shard_bytes,
        )
        say(f"model: {folder / 'model'}")


if __name__ == "__main__":
    logging.basicConfig(
        level=logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.ERROR,
        format="%(levelname)s: %(message)s",
    )
    try:
        main()
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(20)  # one voice: the launcher ends this rank as soon as rank 0 has spoken
        for problem in error.problems:
            print(f"error: {in_own_words(problem)}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
