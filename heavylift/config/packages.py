"""Packages of others that a monitor needs and the user may not have installed. Imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Package (import name) that a kind of monitor needs."""


def missing_package(kind: str) -> str | None:
    """The package to install for this kind of monitor, None where there is nothing to install."""
    name = NEEDS.get(kind)
    return name if name is not None and find_spec(name) is None else None
