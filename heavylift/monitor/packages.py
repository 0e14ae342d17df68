"""Importing what a sink needs and the user may not have installed."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from heavylift.errors import UserError

NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Package (import name) that a kind of sink needs."""


def missing_package(kind: str) -> str | None:
    """The package to install for this kind of sink, None where there is nothing to install. Imports nothing."""
    name = NEEDS.get(kind)
    return name if name is not None and find_spec(name) is None else None


def import_for(kind: str, module: str) -> ModuleType:
    """Imports `module`. Raises UserError where its package is missing or broken."""
    try:
        return importlib.import_module(module)
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
