"""The switches of finetune.py, and the recipe that heavylift's data, schedule and metrics read them from.

As a program it only looks at them, without torch: finetune.sh asks before it writes anything.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import NoReturn

import heavylift
from heavylift.config.model_folder import folder_here
from heavylift.config.schema import DataConfig, ModelConfig, Recipe, TrainConfig
from heavylift.errors import EXIT_USER_ERROR, UserError

EXAMPLE_DATA = Path(__file__).resolve().parents[2] / "data" / "alpaca_small.jsonl"
RANDOM_STEPS = 10
"""Steps on random tokens, where neither data nor a number of steps is given."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"finetune.py: {message}; see finetune.py --help")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. Raises UserError, one line per problem; `--help` prints and leaves."""
    parser = _Parser(
        description="Fine-tune a causal language model through heavylift.initialize().", allow_abbrev=False
    )
    add = parser.add_argument
    add("--model_name", required=True, help="model folder or hub id; a folder with config.json alone: random weights")
    add("--tokenizer_name", help="folder or hub id of the tokenizer; default: the model's")
    add("--dataset", help="JSON-lines file in alpaca or messages format; default: a small one that comes along")
    add("--dataset_name", help="data set of the Hugging Face hub in alpaca format (needs the package `datasets`)")
    add("--dataset_percentage", type=float, default=100.0, help="share of the samples to use, from the first")
    add("--chat_template", help="file with a Jinja chat template; default: the tokenizer's")
    add("--max_length", type=int, default=4096, help="longest sample in tokens; longer ones are cut")
    add("--batch_size", type=int, help="sequences per GPU and micro-batch; default: what the ds_config says")
    add("--fit_ratio", action="store_true", help="a lower offload_optimizer.ratio where the host has no room for it")
    add("--num_train_epochs", type=float, default=1.0)
    add("--lr", type=float, default=1e-5)
    add("--warmup_ratio", type=float, default=0.05, help="share of the steps with rising learning rate")
    add("--weight_decay", type=float, default=0.01, help="of matrices; norms and biases have none")
    add("--seed", type=int, default=42)
    add("--deterministic", action="store_true", help="only kernels that give the same bits every time")
    add("--activation_checkpointing", action="store_true", help="compute activations of layers again in backward")
    add("--attn_implementation", choices=("auto", "sdpa", "eager"), default="auto")
    add("--leaf_module", action="append", default=[], metavar="CLASS", help="modules that are gathered whole (MoE)")
    add("--log_interval", type=int, default=1, help="steps between two lines")
    add("--bench_steps", type=int, default=0, help="end after so many steps; 0: train all epochs")
    add("--warmup_steps", type=int, default=0, help="of those, the first so many stay out of the statistics")
    add("--output_dir", required=True, help="metrics.jsonl and what is saved go there")
    add("--save_checkpoint", action="store_true", help="weights and optimizer states at the end, to resume from")
    add("--save_model", action="store_true", help="the model as a Hugging Face folder at the end")
    add("--use_wandb", action="store_true", help="report to Weights & Biases (WANDB_PROJECT names the project)")
    add("--local_rank", type=int, default=0, help="set by the launcher")
    args = heavylift.add_config_arguments(parser).parse_args(argv)
    problems = list(_problems(args))
    if problems:
        raise UserError(*problems)
    return args


def _problems(args: argparse.Namespace) -> list[str]:
    found = []
    if args.deepspeed_config is None:
        found.append("--deepspeed_config: expected the path of a ds_config.json; finetune.sh writes one")
    if args.dataset is not None and args.dataset_name is not None:
        found.append("--dataset and --dataset_name: give one of them")
    if not 0 < args.dataset_percentage <= 100:
        found.append(f"--dataset_percentage {args.dataset_percentage:g}: expected a share above 0, up to 100")
    if not 0 <= args.warmup_ratio <= 1:
        found.append(f"--warmup_ratio {args.warmup_ratio:g}: expected a share from 0 to 1")
    for name, least in (("max_length", 2), ("log_interval", 1), ("bench_steps", 0), ("warmup_steps", 0)):
        if getattr(args, name) < least:
            found.append(f"--{name} {getattr(args, name)}: expected at least {least}")
    for name in ("lr", "weight_decay"):
        if not 0 <= getattr(args, name) < math.inf:
            found.append(f"--{name} {getattr(args, name):g}: expected at least 0")
    if not 0 <= args.seed < 2**32:
        found.append(f"--seed {args.seed}: expected a whole number from 0 below 4294967296")
    if not 0 < args.num_train_epochs < math.inf:
        found.append(f"--num_train_epochs {args.num_train_epochs:g}: expected more than 0")
    if args.batch_size is not None and args.batch_size < 1:
        found.append(f"--batch_size {args.batch_size}: expected at least 1")
    if args.bench_steps and args.warmup_steps >= args.bench_steps:
        found.append(f"--warmup_steps {args.warmup_steps}: leaves none of --bench_steps {args.bench_steps} to measure")
    return found


def check_inputs(args: argparse.Namespace) -> None:
    """Raises UserError, one line per problem, for files and folders that are not there. A hub id is not looked up."""
    problems = []
    folders = {"--model_name (finetune.sh: MODEL)": args.model_name, "--tokenizer_name": args.tokenizer_name}
    for switch, name in folders.items():
        try:
            if name is not None:
                folder_here(name, switch)
        except UserError as error:
            problems += error.problems
    for switch, name in {"--dataset": args.dataset, "--chat_template": args.chat_template}.items():
        if name is not None and not Path(name).expanduser().is_file():
            problems.append(f"{name}: no such file; change {switch}")
    if problems:
        raise UserError(*problems)


def check_output(args: argparse.Namespace) -> None:
    """Raises UserError where nothing can be written, and where what would be saved after training is there already,
    from an earlier run."""
    folder = Path(args.output_dir)
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"--output_dir {folder}: cannot make the folder, as {above} is no folder or cannot be written")
    if (folder / "metrics.jsonl").is_dir():
        raise UserError(f"--output_dir {folder}: metrics.jsonl in it is a folder; move it away")
    wanted = {"model": args.save_model, "checkpoint": args.save_checkpoint}
    there = [str(folder / name) for name, saves in wanted.items() if saves and (folder / name).exists()]
    if there:
        raise UserError(
            f"{', '.join(there)}: there already, from an earlier run; move it away, or choose another --output_dir "
            "(finetune.sh: OUTPUT_DIR)"
        )


def recipe_of(args: argparse.Namespace, *, has_weights: bool, has_tokenizer: bool, rows_per_step: int) -> Recipe:
    """What the switches mean in heavylift's own words. `rows_per_step`: sequences of one optimizer step, all ranks."""
    model = ModelConfig(
        model_name_or_path=args.model_name,
        tokenizer_name_or_path=args.tokenizer_name,
        init="pretrained" if has_weights else "random",
        dtype="bfloat16",
        attn_implementation=args.attn_implementation,
    )
    if has_tokenizer:
        data = DataConfig(
            dataset=args.dataset or str(EXAMPLE_DATA),
            chat_template=args.chat_template,
            cutoff_len=args.max_length,
            overlong="truncate",
        )
    else:
        num_samples = rows_per_step * (args.bench_steps or RANDOM_STEPS)
        data = DataConfig(format="random", cutoff_len=args.max_length, num_samples=num_samples)
    train = TrainConfig(
        output_dir=args.output_dir,
        learning_rate=args.lr,
        warmup_ratio=args.warmup_ratio,
        weight_decay=args.weight_decay,
        num_train_epochs=args.num_train_epochs,
        max_steps=args.bench_steps or None,
        gradient_checkpointing=args.activation_checkpointing,
        seed=args.seed,
        report_to=("wandb",) if args.use_wandb else (),
    )
    return Recipe(model=model, data=data, train=train)


if __name__ == "__main__":
    try:
        given = parse_arguments()
        check_inputs(given)
        check_output(given)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
