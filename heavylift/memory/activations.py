"""What a decoder layer and the loss leave on the device: bytes computed from a model's sizes and a recipe, no torch.

`b` is the parameters' bytes per element, `T` the tokens of the widest micro-batch, `h` the hidden size, `q` and `kv`
the widths of queries and of keys (values), `f` the width of the MLP, `v` the vocabulary. Counted are the tensors that
autograd saves in a Llama-like layer (two norms, attention, gated MLP); `docs/memory.md` compares the result with
measured peaks. A layer of another kind is counted as if it were one of these; without a gate that is too much.

Left out: the allocator's rounding (`heavylift.memory.fit` keeps room for it), and what backward frees late.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Recompute(StrEnum):
    """What of a layer is computed again in backward."""

    NOTHING = "nothing"
    SELECTIVE = "selective"
    """All but the outputs of matmuls and attention."""
    FULL = "full"


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a causal language model, in elements."""

    num_layers: int
    hidden: int
    query_width: int
    key_width: int
    mlp_width: int
    """Of one token: with experts, those that work for it together."""
    num_heads: int
    vocab: int

    @classmethod
    def from_config(cls, hf_config: Any) -> LayerShape | None:
        """From a transformers config; None where it does not say how large a layer is."""
        config = hf_config.get_text_config()
        hidden, num_layers, num_heads = (
            _whole(config, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        vocab = _whole(config, "vocab_size")
        if hidden is None or num_layers is None or num_heads is None or vocab is None:
            return None
        head_dim = _whole(config, "head_dim") or hidden // num_heads
        num_key_heads = _whole(config, "num_key_value_heads") or num_heads
        return cls(
            num_layers=num_layers,
            hidden=hidden,
            query_width=num_heads * head_dim,
            key_width=num_key_heads * head_dim,
            mlp_width=_mlp_width(config, hidden),
            num_heads=num_heads,
            vocab=vocab,
        )


def _whole(config: Any, name: str) -> int | None:
    layers = list(getattr(config, "per_layer_config", None) or ())
    if layers:  # Gemma 4: asked for one value of all, its config raises; the largest layer is what has to fit
        values = [getattr(layer, name, None) for layer in layers]
        value = max((each for each in values if isinstance(each, int)), default=None)
    else:
        value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _mlp_width(config: Any, hidden: int) -> int:
    dense = _whole(config, "intermediate_size") or 4 * hidden
    experts = _whole(config, "num_experts_per_tok")
    if experts is None:
        return dense
    shared = _whole(config, "shared_expert_intermediate_size") or 0
    # models that mix dense layers and layers of experts: the wider of the two
    return max(dense, experts * (_whole(config, "moe_intermediate_size") or dense) + shared)


@dataclass(frozen=True)
class Workload:
    """What one process computes on in one forward and backward."""

    micro_batch: int
    seq: int
    """Positions of the longest sample, padded."""
    recompute: Recompute = Recompute.NOTHING
    recompute_every: int = 1
    """With recomputation: layers 0, N, 2N, ... are."""
    inputs_on_host: bool = False
    """Whether the inputs of recomputed layers wait in host memory."""
    chunk_tokens: int = 0
    """Tokens whose logits exist at a time; 0: whole logits."""
    compiled: bool = False
    """Layers are compiled: what is cheap to compute is then not saved."""
    eager_attention: bool = False
    """Attention that writes its scores to memory."""

    @property
    def num_tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.seq

    def recomputes(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) is computed again."""
        return self.recompute is not Recompute.NOTHING and layer % self.recompute_every == 0


def saved_bytes(shape: LayerShape, work: Workload, itemsize: int) -> int:
    """Device bytes that a layer without recomputation keeps for its backward.

    Compiled: the layer's input and that of its MLP (h each), queries, keys, values, attention's output, gate and up (f
    each); norms and activation functions are computed again from these. Eager adds the norms' float32 copies (4 h
    bytes each), their normalised and scaled outputs, and the two products of the MLP.
    """
    h, q, kv, f = shape.hidden, shape.query_width, shape.key_width, shape.mlp_width
    if work.compiled:
        per_token = itemsize * (2 * h + 2 * q + 2 * kv + 2 * f)
    else:
        per_token = 2 * (4 * h + 2 * itemsize * h) + itemsize * (2 * q + 2 * kv + 4 * f)
    return work.num_tokens * (per_token + _score_bytes(shape, work, itemsize))


def _score_bytes(shape: LayerShape, work: Workload, itemsize: int) -> int:
    """Per token, of attention that keeps softmax(scores) in float32 and, where that is another, in the parameters'
    dtype."""
    if not work.eager_attention:
        return 0
    return shape.num_heads * work.seq * (4 + (itemsize if itemsize != 4 else 0))


def input_bytes(shape: LayerShape, work: Workload, itemsize: int) -> int:
    """Bytes of what one layer hands to the next."""
    return work.num_tokens * shape.hidden * itemsize


def kept_bytes(shape: LayerShape, work: Workload, itemsize: int, layer: int) -> int:
    """Device bytes that layer `layer` keeps between its forward and its backward."""
    if not work.recomputes(layer):
        return saved_bytes(shape, work, itemsize)
    kept = 0 if work.inputs_on_host else shape.hidden
    if work.recompute is Recompute.SELECTIVE:
        # outputs of q, k, v, o, gate, up, down and of attention
        kept += 2 * shape.hidden + 2 * shape.query_width + 2 * shape.key_width + 2 * shape.mlp_width
    return work.num_tokens * kept * itemsize


def backward_bytes(shape: LayerShape, work: Workload, itemsize: int, layer: int) -> int:
    """Device bytes that layer `layer`'s backward takes at its peak, beside what it kept.

    The activations that are computed again, and gradients: of the MLP's parts and the recomputed product (5 f), of the
    layer's input, output and residual (3 h).
    """
    gradients = itemsize * (5 * shape.mlp_width + 3 * shape.hidden)
    if work.eager_attention:
        gradients = max(gradients, 2 * shape.num_heads * work.seq * 4)
    needed = work.num_tokens * gradients
    if not work.recomputes(layer):
        return needed
    again = saved_bytes(shape, work, itemsize)
    if work.recompute is Recompute.SELECTIVE:
        again -= min(again, kept_bytes(shape, work, itemsize, layer))
    if work.inputs_on_host:
        # the input that is fetched back, and the one that is fetched ahead
        again += 2 * input_bytes(shape, work, itemsize)
    return needed + again


def loss_bytes(shape: LayerShape, work: Workload, itemsize: int) -> int:
    """Device bytes of final norm, logits and loss at their peak, gathered weights excepted.

    In chunks: the head's gradient in float32 (4 v h) and rounded, the hidden states' in float32 and rounded, three
    tensors like a chunk's float32 logits. Whole: three like all float32 logits (log-softmax, its gradient, theirs).
    """
    norm = work.num_tokens * shape.hidden * (4 + 3 * itemsize)
    if work.chunk_tokens == 0:
        return norm + 3 * 4 * work.num_tokens * shape.vocab
    head = (4 + itemsize) * shape.vocab * shape.hidden
    rows = (2 * 4 + itemsize) * work.num_tokens * shape.hidden
    return norm + head + rows + 3 * 4 * min(work.chunk_tokens, work.num_tokens) * shape.vocab
