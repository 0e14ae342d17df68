"""A model of one's own, whose forward decides by its input which layers run, through `heavylift.initialize`.

    heavylift launch --num_gpus 4 train.py --deepspeed --deepspeed_config ds_config.json

Runs on GPUs or, where there are none, in as many processes on the CPU; seconds either way. ds_config.json: ZeRO-3 with
optimizer states on the host, float16 with a dynamic loss scale, four micro-batches per step. A layer that no
micro-batch of a step has used gets no gradient, on any rank, and the step leaves it and its moments as they are.
The loss falls to a few percent of the first one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import heavylift

WIDTH = 64
NUM_SAMPLES = 4096
RARE_ABOVE = 0.1
"""A batch of 4 rows has a mean above this in one case of 18: in many steps no rank sees one."""


class Net(nn.Module):
    """Regression through one of two experts; which one, the batch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.usual = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.rare = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch, WIDTH], y: [batch, 1] -> mean squared error, a float32 scalar."""
        hidden = self.stem(x)
        # ranks and micro-batches decide differently
        expert = self.rare if x.mean() > RARE_ABOVE else self.usual
        hidden = hidden + heavylift.checkpointing.checkpoint(expert, hidden)
        return nn.functional.mse_loss(self.head(hidden).float(), y.float())


def make_dataset(seed: int) -> Dataset[tuple[Tensor, ...]]:
    """Random points, and a smooth function of them to learn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
    direction = torch.randn(WIDTH, 1, generator=generator) / WIDTH**0.5
    y = x @ direction
    return TensorDataset(x.half(), y.half())


class Parser(argparse.ArgumentParser):
    """A slip on the command line ends as every other: one line, of one rank."""

    def error(self, message: str) -> NoReturn:
        raise heavylift.UserError(f"{message} (--help shows all)")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    args = heavylift.add_config_arguments(parser).parse_args()
    if args.steps < 1:
        parser.error(f"argument --steps: expected a whole number from 1, got {args.steps}")
    if not 0 <= args.seed < 2**32:
        parser.error(f"argument --seed: expected a whole number from 0 below 2^32, got {args.seed}")
    return args


def main() -> None:
    """Trains as the command line says."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    heavylift.checkpointing.configure(None, deepspeed_config=args.deepspeed_config)
    engine, _, loader, _ = heavylift.initialize(args=args, model=Net(), training_data=make_dataset(args.seed))
    assert loader is not None

    batches = iter(loader)
    for step in range(args.steps):
        total = torch.zeros((), device=engine.device)
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches, None)
            if batch is None:  # the next pass over the data
                batches = iter(loader)
                batch = next(batches)
            x, y = (part.to(engine.device) for part in batch)
            loss = engine(x, y)
            total += engine.backward(loss)
            engine.step()
        dist.all_reduce(total)
        if engine.global_rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            mean = total.item() / engine.world_size
            print(f"step {step + 1}  loss {mean:.5f}  loss scale {engine.loss_scale():g}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except heavylift.UserError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(20)  # one voice: the launcher ends this rank as soon as rank 0 has spoken
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
