"""Importing what a sink needs and the user may not have installed."""

from __future__ import annotations

import importlib
from types import ModuleType

from heavylift.config.packages import NEEDS, missing_package
from heavylift.errors import UserError

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "comet": "comet_ml"}


def import_for(kind: str) -> ModuleType | None:
    """Imports what this kind of monitor needs, None where it needs nothing. Raises UserError where the package is
    missing or broken."""
    if kind not in _MODULES:
        return None
    try:
        return importlib.import_module(_MODULES[kind])
    except Exception as error:
        missing = missing_package(kind)
        why = "which is not installed" if missing else f"which cannot be imported ({one_line(error)})"
        raise UserError(
            f"monitor {kind}: needs the package {NEEDS[kind]}, {why}; pip install {NEEDS[kind]}, or switch {kind} off"
        ) from None


def one_line(error: BaseException) -> str:
    """The error's message in one line of at most 200 characters, or its class where it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
