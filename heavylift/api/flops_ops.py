"""FLOPs of operators that `torch.utils.flop_counter` does not know: attention and LSTMs on the CPU, and a few more.

A multiplication and an addition are 2 FLOPs, as there; only products count, nothing that works element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

Shape = Sequence[int]
# every function gets the operator's arguments with shapes in place of tensors, and the shape of the result


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """query [batch, heads, q, dim], key and value [batch, heads, k, dim]; a causal mask saves nothing, as in torch."""
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    grad_out: Shape, query: Shape, key: Shape, value: Shape, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(grad_out, query, key, value))


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


_WANTED: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
    "mv": _matrix_vector,
    "addmv": _add_matrix_vector,
    "dot": _dot,
    "_grouped_mm": _grouped_mm,
    "mkldnn_rnn_layer": _mkldnn_rnn,
    "_cudnn_rnn": _cudnn_rnn,
}


def more_operators() -> dict[Any, Callable[..., int]]:
    """For `FlopCounterMode(custom_mapping=...)`: those of ours that this torch has and does not count itself."""
    found = {getattr(torch.ops.aten, name): count for name, count in _WANTED.items() if name in dir(torch.ops.aten)}
    return {operator: count for operator, count in found.items() if operator not in flop_registry}
