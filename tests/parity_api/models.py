"""Models and data of the comparisons: a tiny Llama, and a custom module that decides by its data what it uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from ranks.llamas import llama_config
from torch import nn

ROWS = 16
"""Rows of one optimizer step: 4 ranks x 4 micro-batches x 1 row, or fewer of either with more rows."""
NUM_STEPS = 4
VOCAB = 61


class Branches(nn.Module):
    """Sizes that no number of ranks divides; a buffer that bfloat16 would change.

    One of two branches is used, by the sign of the input's sum; `spare` never, `late` only where an input is large.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(5, 9)
        self.left = nn.Linear(9, 7)
        self.right = nn.Linear(9, 7, bias=False)
        self.late = nn.Parameter(torch.full((3,), 0.5))
        self.spare = nn.Linear(3, 3)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.outside = nn.Linear(7, 1)
        self.register_buffer("frequencies", torch.linspace(0.9, 1.1, 7))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """x: [rows, 5], y: [rows, 1], in the parameters' dtype."""
        hidden = torch.tanh(self.inside(x))
        hidden = self.left(hidden) if float(x.float().sum()) > 0 else self.right(hidden)
        if float(x.abs().max()) > 2.6:
            hidden = hidden * self.late.mean()
        hidden = self.frozen(hidden) * self.frequencies.to(hidden.dtype)
        return {"loss": (self.outside(hidden) - y).float().square().mean()}


def make_branches() -> nn.Module:
    torch.manual_seed(3)
    return Branches()


def make_llama() -> nn.Module:
    """Uneven sizes, grouped queries, tied embeddings."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(4)
    more = {"head_dim": 6, "max_position_embeddings": 32, "initializer_range": 0.2, "use_cache": False}
    config = llama_config(VOCAB, 18, 21, 2, 3, 1, tied=True, **more)
    return LlamaForCausalLM(config)


MAKERS: dict[str, Callable[[], nn.Module]] = {"branches": make_branches, "llama": make_llama}


def micro_batches(model_name: str, num_micro_batches: int, dtype: torch.dtype) -> list[list[dict[str, Any]]]:
    """Step -> micro-batch -> keyword arguments of forward; the same rows however many micro-batches they make."""
    generator = torch.Generator().manual_seed(5)
    steps = []
    for _ in range(NUM_STEPS):
        if model_name == "llama":
            ids = torch.randint(0, VOCAB, (ROWS, 7), generator=generator)
            step: dict[str, torch.Tensor] = {"input_ids": ids, "labels": ids}
        else:
            x = torch.randn(ROWS, 5, generator=generator)
            step = {"x": x.to(dtype), "y": torch.randn(ROWS, 1, generator=generator).to(dtype)}
        pieces = {key: value.chunk(num_micro_batches) for key, value in step.items()}
        steps.append([{key: piece[i] for key, piece in pieces.items()} for i in range(num_micro_batches)])
    return steps


def dealt(batches: list[dict[str, Any]], rank: int, world_size: int) -> Iterator[dict[str, Any]]:
    """One rank's micro-batches of a step."""
    yield from batches[rank::world_size]
