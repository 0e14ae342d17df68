"""FLOPs of operators that `torch.utils.flop_counter` does not know: attention and LSTMs on the CPU, and a few more; and
of attention everywhere, where torch 2.11 raises for keys and values of fewer heads than the queries.

A multiplication and an addition are 2 FLOPs, as there; only products count, nothing that works element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

Shape = Sequence[int]
# every function gets the operator's arguments with shapes in place of tensors, and the shape of the result


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """query [batch, heads, q, dim], key [batch, fewer, k, dim], value [batch, fewer, k, other]: a head of keys serves
    several of queries. A causal mask saves nothing, as in torch."""
    scores = _scores(query, key)
    return 2 * scores * (query[-1] + value[-1])


def _attention_backward(
    grad_out: Shape, query: Shape, key: Shape, value: Shape, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """The scores again, then four products: the gradients of scores, values, queries and keys."""
    scores = _scores(query, key)
    return 2 * scores * (3 * query[-1] + 2 * value[-1])


def _scores(query: Shape, key: Shape) -> int:
    batch, heads, num_queries, _ = query
    return batch * heads * num_queries * key[-2]


def _matrix_vector(matrix: Shape, vector: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """matrix [m, n], vector [n]."""
    return 2 * matrix[0] * matrix[1]


def _add_matrix_vector(
    bias: Shape, matrix: Shape, vector: Shape, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return _matrix_vector(matrix, vector)


def _dot(left: Shape, right: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * left[0]


def _grouped_mm(left: Shape, right: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """left [m, k] or [groups, m, k], right [k, n] or [groups, k, n]; where one has no groups its rows are dealt out."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]


def _mkldnn_rnn(
    input: Shape, weight_ih: Shape, weight_hh: Shape, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """One layer in one direction; input [time, batch, features], weights [gates * hidden, features or hidden]."""
    return 2 * input[0] * input[1] * (weight_ih[0] * weight_ih[1] + weight_hh[0] * weight_hh[1])


def _cudnn_rnn(input: Shape, weights: Sequence[Shape], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """All layers and directions; input [time, batch, features] (or the other way round)."""
    return 2 * input[0] * input[1] * sum(weight[0] * weight[1] for weight in weights if len(weight) == 2)


_KINDS = (
    "efficient_attention",
    "flash_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
    "fused_attention_overrideable",
)
_ATTENTION: dict[str, Callable[..., int]] = {
    **{f"_scaled_dot_product_{kind}": _attention for kind in _KINDS},
    **{f"_scaled_dot_product_{kind}_backward": _attention_backward for kind in _KINDS},
}
_OTHERS: dict[str, Callable[..., int]] = {
    "mv": _matrix_vector,
    "addmv": _add_matrix_vector,
    "dot": _dot,
    "_grouped_mm": _grouped_mm,
    "mkldnn_rnn_layer": _mkldnn_rnn,
    "_cudnn_rnn": _cudnn_rnn,
}


def more_operators() -> dict[Any, Callable[..., int]]:
    """For `FlopCounterMode(custom_mapping=...)`: attention, and those of ours that this torch does not count itself."""
    missing = {operator: count for operator, count in _there(_OTHERS).items() if operator not in flop_registry}
    return {**_there(_ATTENTION), **missing}


def _there(counts: dict[str, Callable[..., int]]) -> dict[Any, Callable[..., int]]:
    """By operator, of those that this torch has."""
    return {getattr(torch.ops.aten, name): count for name, count in counts.items() if name in dir(torch.ops.aten)}
