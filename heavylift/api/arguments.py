"""The command-line arguments that training scripts share, and where the configuration comes from."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from heavylift.errors import UserError

_ARGUMENT = "deepspeed_config"


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds `--deepspeed`, `--deepspeed_config` (and their old spelling) to a script's parser; returns it.

    `--deepspeed` is a flag for the script's own use; `initialize(args=...)` reads `--deepspeed_config`.
    """
    group = parser.add_argument_group("DeepSpeed", "sharded training, configured by a ds_config.json")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(f"--{name}", default=False, action="store_true", help="train through initialize()")
        group.add_argument(f"--{name}_config", default=None, type=str, help="path of the ds_config.json")
    return parser


def find_config(args: Any, config: Any, config_params: Any) -> Any:
    """The one configuration among the arguments of `initialize`. Raises UserError for none, or several."""
    from_args = getattr(args, _ARGUMENT, None) or getattr(args, "deepscale_config", None)
    given = {
        "config": config,
        "config_params": config_params,
        f"args.{_ARGUMENT}": from_args,
    }
    found = {name: value for name, value in given.items() if value is not None}
    if not found:
        raise UserError(
            f"initialize: no configuration; pass config= (a dict or the path of a ds_config.json) or args.{_ARGUMENT}"
        )
    if len(found) > 1:
        raise UserError(f"initialize: the configuration is given {len(found)} times ({', '.join(found)}); keep one")
    return next(iter(found.values()))
