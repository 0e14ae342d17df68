"""Cross-entropy of a linear head without whole logits: the logits of one chunk of tokens exist at a time.

Whole logits are [tokens, vocab] in float32, and their gradient again: 8.4 GB each for 4 x 4096 tokens and a vocabulary
of 128k. Here tokens without label are left out before the matmul, and each chunk's gradient is computed as soon as its
logits are there, in forward: the head is the last of a forward and the first of a backward, so nothing is kept longer
than it would be anyway, and no logits are computed twice. Gradients add up in float32.

Left out: anything between the matmul and the loss (soft caps, scales, biases); see `heavylift.models.loss_head`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from heavylift.transfer import to_device

IGNORED = -100
"""The label of a position where nothing is predicted."""


@dataclass(frozen=True)
class Targets:
    """The trained tokens of a micro-batch."""

    rows: Tensor
    """int64 [trained]: positions in the flattened [batch * seq]."""
    ids: Tensor
    """int64 [trained]: the token to predict there."""

    @classmethod
    def of(cls, labels: Tensor, device: torch.device) -> Targets:
        """From labels, int64 [batch, seq], -100 where there is none. On the CPU this does not wait for the GPU."""
        flat = labels.flatten()
        rows = (flat != IGNORED).nonzero().squeeze(1)
        ids = flat[rows]
        return cls(to_device(rows, device), to_device(ids, device))

    def chunks(self, chunk_tokens: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(place among the trained tokens, rows, ids) of at most `chunk_tokens` each, about equally many."""
        num_tokens = self.rows.numel()
        num_chunks = -(-num_tokens // chunk_tokens)
        for index in range(num_chunks):
            part = slice(index * num_tokens // num_chunks, (index + 1) * num_tokens // num_chunks)
            yield part, self.rows[part], self.ids[part]


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Targets, chunk_tokens: int) -> Tensor:
    """Sum of the cross-entropies of `hidden @ weight.T` over the trained tokens, float32 scalar.

    hidden: [batch, seq, hidden]; weight: [vocab, hidden], of one dtype (bfloat16 or float32). Gradients reach both
    where they require one; without trained tokens the loss and all gradients are zero.
    """
    assert chunk_tokens > 0, f"{chunk_tokens=}"
    assert hidden.dtype == weight.dtype, f"{hidden.dtype=} {weight.dtype=}"
    wants_grad = torch.is_grad_enabled()
    loss: Tensor = _ChunkedCrossEntropy.apply(
        hidden,
        weight,
        targets,
        chunk_tokens,
        wants_grad and hidden.requires_grad,
        wants_grad and weight.requires_grad,
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Targets,
        chunk_tokens: int,
        for_hidden: bool,
        for_weight: bool,
    ) -> Tensor:
        flat = hidden.flatten(0, -2)
        # a GPU multiplies bfloat16 into float32; a CPU cannot, so there the operands are widened
        operand = weight if weight.is_cuda else weight.float()
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
        num_trained, width = targets.rows.numel(), hidden.shape[-1]
        grad_rows = flat.new_empty(num_trained, width, dtype=torch.float32) if for_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
        for part, rows, ids in targets.chunks(chunk_tokens):
            inputs = flat[rows].to(operand.dtype)
            log_probs = torch.log_softmax(_matmul(inputs, operand.t()), dim=-1)
            loss_sum -= log_probs.gather(1, ids[:, None]).sum()
            if not (for_hidden or for_weight):
                continue
            # d loss / d logits = softmax - one-hot, in float32, rounded once for the matmuls
            grad_logits = log_probs.exp_()
            grad_logits.scatter_add_(1, ids[:, None], grad_logits.new_full((len(ids), 1), -1.0))
            rounded = grad_logits.to(operand.dtype)
            del log_probs, grad_logits
            if grad_rows is not None:
                grad_rows[part] = _matmul(rounded, operand)
            if grad_weight is not None:
                _add_matmul(grad_weight, rounded.t(), inputs)
        ctx.save_for_backward(targets.rows, grad_rows, grad_weight)
        ctx.hidden_shape, ctx.dtype = hidden.shape, hidden.dtype
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        rows, grad_rows, grad_weight = ctx.saved_tensors
        hidden_grad = weight_grad = None
        if grad_rows is not None:
            hidden_grad = grad_rows.new_zeros(ctx.hidden_shape, dtype=ctx.dtype)
            hidden_grad.flatten(0, -2)[rows] = (grad_rows * grad_loss).to(ctx.dtype)
        if grad_weight is not None:
            # scaled and rounded in one pass: no second float32 copy
            weight_grad = torch.mul(grad_weight, grad_loss, out=torch.empty_like(grad_weight, dtype=ctx.dtype))
        return hidden_grad, weight_grad, None, None, None, None


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, whatever the operands are."""
    return torch.mm(a, b) if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in float32, inside the matmul where this build of PyTorch can."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif _accumulates_wider(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += _matmul(a, b)


@functools.cache
def _accumulates_wider(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `addmm` adds a narrow product to a float32 total: not in the first releases that had `out_dtype`."""
    total, ones = torch.ones(16, 16, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17.0).all())
