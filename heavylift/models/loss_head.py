"""The head that returns the loss: a model's output embedding computes the cross-entropy itself, chunk by chunk.

It must happen inside the head's forward, because only there is its weight gathered, whether the head is a group of its
own or, tied, a part of the root. The head keeps being the same module with the same parameter names: it only changes
its class, as it does again under `fully_shard`. While targets are set its forward returns the loss sum, which the model
passes on as `logits`; without targets it is the plain head.

A model that does anything to its logits after the head (Gemma 2's soft cap, Cohere's and Granite's scales) cannot be
trained this way. That is found out by running the model's forward around a stand-in for its body, not from a list of
names. Left out: heads with a bias, heads that are no `nn.Linear`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from heavylift.errors import UserError
from heavylift.models.chunked_loss import Targets, chunked_cross_entropy

CHUNK_LOGITS_BYTES = 256 * 2**20
"""What the float32 logits of a chunk take with `auto`."""
_TILE_TOKENS = 128  # whole tiles of the matrix units


class LossHead(nn.Linear):
    """An output embedding that returns the loss sum while `loss_sum` runs the model. Made by `install_loss_head`."""

    chunk_tokens: int
    _targets: Targets | None
    _loss: tuple[Tensor, int] | None
    """What forward returned, and its version then."""

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [batch, seq, hidden] -> logits [batch, seq, vocab], or within `loss_sum` the loss sum, a scalar."""
        if self._targets is None:
            return super().forward(hidden)
        assert self._loss is None, "the head ran twice in one forward of the model"
        loss = chunked_cross_entropy(hidden, self.weight, self._targets, self.chunk_tokens)
        self._loss = (loss, loss._version)
        return loss

    def loss_sum(self, model: nn.Module, input_ids: Tensor, targets: Targets) -> Tensor:
        """Sum of the cross-entropies over the trained tokens, float32 scalar. `model` owns this head.

        input_ids: int64 [batch, seq]; the rows of `targets` are positions of them.
        """
        output, loss = self._run(model, input_ids, targets)
        assert loss is not None and _is_untouched(output, *loss), "the model changed its logits after the head"
        return loss[0]

    def _run(self, model: nn.Module, input_ids: Tensor, targets: Targets) -> tuple[Any, tuple[Tensor, int] | None]:
        self._targets, self._loss = targets, None
        try:
            output = model(input_ids=input_ids, use_cache=False).logits
            return output, self._loss
        finally:
            self._targets = self._loss = None


def _is_untouched(output: Any, loss: Tensor, version: int) -> bool:
    # the same tensor, and nothing was done to it in place
    return output is loss and loss._version == version


def find_loss_head(model: nn.Module) -> LossHead | None:
    """The head that `install_loss_head` made of `model`'s, None where there is none."""
    head = _output_embeddings(model)
    return head if isinstance(head, LossHead) else None


def install_loss_head(model: nn.Module, chunk_tokens: Literal["auto"] | int) -> str | None:
    """Makes the model's head one that can return the loss. Before `fully_shard`; the meta device is enough.

    `chunk_tokens`: tokens whose logits exist at a time; 0 leaves the model alone. Returns None, or with `auto` the
    reason why this model keeps its whole logits. Raises UserError where a number was asked for and cannot be had.
    """
    if chunk_tokens == 0:
        return None
    head = _output_embeddings(model)
    reason = _unsuitable(head)
    if reason is None:
        assert isinstance(head, nn.Linear)
        head.__class__ = LossHead
        assert isinstance(head, LossHead)
        head.chunk_tokens = auto_chunk_tokens(head.out_features) if chunk_tokens == "auto" else chunk_tokens
        head._targets = head._loss = None
        reason = _probe(model, head)
        if reason is not None:
            head.__class__ = nn.Linear  # type: ignore[assignment]
    if reason is not None and chunk_tokens != "auto":
        raise UserError(
            "train.loss_chunk_tokens: expected a model whose loss can be computed in chunks, but "
            f"{type(model).__name__} {reason}; set it to auto or 0"
        )
    return None if reason is None else f"{type(model).__name__} {reason}"


def auto_chunk_tokens(vocab_size: int) -> int:
    """Tokens whose float32 logits take about 256 MiB, in whole tiles."""
    return max(1, round(CHUNK_LOGITS_BYTES / (4 * vocab_size * _TILE_TOKENS))) * _TILE_TOKENS


def _output_embeddings(model: nn.Module) -> Any:
    try:
        return model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def _unsuitable(head: Any) -> str | None:
    if type(head) is not nn.Linear:
        return f"has a head of the class {type(head).__name__}" if head is not None else "names no head"
    return "has a head with a bias" if head.bias is not None else None


def _probe(model: nn.Module, head: LossHead) -> str | None:
    """Runs the model's forward around a stand-in for its body: does what the head returns come out untouched?"""
    body = getattr(model, "base_model", model)
    if body is model:
        return "has no body apart from its head"
    device, dtype = head.weight.device, head.weight.dtype
    hidden = torch.empty(1, 2, head.in_features, dtype=dtype, device=device)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    output = _body_output(hidden)
    body.forward = lambda *args, **kwargs: output
    try:
        with torch.no_grad():
            logits, loss = head._run(model, ids, Targets(nothing, nothing))
    except Exception as error:  # code of somebody else's: whatever it raises, whole logits are right
        return f"has a forward that could not be examined ({type(error).__name__}: {error})".splitlines()[0]
    finally:
        del body.forward
    if loss is None:
        return "does not call its head in forward"
    return None if _is_untouched(logits, *loss) else "changes its logits after the head"


def _body_output(hidden: Tensor) -> Any:
    """What a transformers body returns, with None for every field that only some of them have."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    @dataclass
    class BodyOutput(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return BodyOutput(last_hidden_state=hidden)
