"""Data of finetune.py: alpaca rows, of which the answers alone are trained, or random tokens to measure with.

Padding and prompts have no label (-100). Every rank computes the same plan, and takes its rows of each step from it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from heavylift.config.model_folder import TOKENIZER_FILES, resolve_tokenizer_folder
from heavylift.config.schema import Recipe
from heavylift.data.batches import BatchPlan
from heavylift.data.tokenise import load_samples
from heavylift.errors import UserError
from heavylift.models.load import model_max_length
from heavylift.train.setup import PAD_MULTIPLE, load_tokenizer


def has_tokenizer(name: str) -> bool:
    """Whether `name`, a folder or a hub id, brings a tokenizer: a hub id is taken to."""
    folder = Path(name).expanduser()
    return not folder.is_dir() or any((folder / file).is_file() for file in TOKENIZER_FILES)


def fetch_dataset(args: argparse.Namespace, rank: int) -> None:
    """Rank 0 writes `--dataset_name` as JSON lines, which `--dataset` then names. A collective."""
    if args.dataset_name is None:
        return
    try:
        import datasets
    except ImportError:
        raise UserError(
            "--dataset_name: needs the package datasets (pip install datasets); or give a JSON-lines file by --dataset"
        ) from None
    path = Path(args.output_dir) / "dataset.jsonl"
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            datasets.load_dataset(args.dataset_name, split="train").to_json(path, force_ascii=False)
        except Exception as error:  # network, no such data set, gated, disk: all mean that it is not here
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"--dataset_name {args.dataset_name}: cannot be fetched: {reason}") from None
    dist.barrier()
    args.dataset = str(path)


def make_plan(
    args: argparse.Namespace,
    recipe: Recipe,
    hf_config: Any,
    *,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    device_type: str,
) -> tuple[BatchPlan, Any]:
    """What every rank trains on in every step; and the tokenizer, None with random tokens.

    Raises UserError for rows, lengths and templates that do not fit.
    """
    longest = model_max_length(hf_config)
    if longest is not None and args.max_length > longest:
        raise UserError(f"--max_length {args.max_length}: the model takes {longest} tokens; lower it")
    tokenizer: Any = None
    if recipe.data.format != "random":
        resolve_tokenizer_folder(recipe)
        tokenizer = load_tokenizer(recipe)
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "heavylift" / "tokens"
    vocab_size = getattr(hf_config, "vocab_size", None)
    samples = load_samples(recipe, lambda: tokenizer, cache_dir, longest, vocab_size)
    if args.dataset_percentage < 100 and tokenizer is not None:
        samples = samples.subset(np.arange(max(1, round(len(samples) * args.dataset_percentage / 100))))
    multiple = PAD_MULTIPLE[device_type]
    return BatchPlan(samples, micro_batch, accumulation, world_size, recipe.train.seed, multiple), tokenizer
