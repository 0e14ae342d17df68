"""What fills "auto": the values that a trainer knows, by the places where DeepSpeed configs say "auto".

Hugging Face's Trainer and Accelerate fill them from their own arguments; `defaults` brings such values here, under the
short names of `PLACES` or under a key's own path such as `optimizer.params.lr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AUTO = "auto"

PLACES: dict[str, tuple[str, ...]] = {
    "lr": ("optimizer.params.lr", "scheduler.params.warmup_max_lr"),
    "betas": ("optimizer.params.betas",),
    "eps": ("optimizer.params.eps",),
    "weight_decay": ("optimizer.params.weight_decay",),
    "total_num_steps": ("scheduler.params.total_num_steps",),
    "warmup_num_steps": ("scheduler.params.warmup_num_steps",),
    "warmup_min_lr": ("scheduler.params.warmup_min_lr",),
    "bf16": ("bf16.enabled",),
    "fp16": ("fp16.enabled",),
    "hidden_size": (),
}
"""Short name -> the keys that it fills. `hidden_size` sizes DeepSpeed's buckets, which have no effect here."""


def fillings(defaults: Mapping[str, Any] | None, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Path of a key -> the value that its "auto" gets. A None is unknown.

    Where nobody knows the scheduler's highest rate, it is the optimizer's `lr` in the file, as in Hugging Face.
    """
    found: dict[str, Any] = {}
    lr = _lr_of(raw)
    if lr is not None:
        found["scheduler.params.warmup_max_lr"] = lr
    for name, value in (defaults or {}).items():
        if value is None:
            continue
        for path in PLACES.get(name, (name,)):
            found[path] = value
    return found


def _lr_of(raw: Mapping[str, Any]) -> float | None:
    optimizer = raw.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    lr = params.get("lr") if isinstance(params, Mapping) else None
    return lr if isinstance(lr, int | float) and not isinstance(lr, bool) else None
