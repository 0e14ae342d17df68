"""Which optimizer trains, and over which parameter groups: from the configuration, or from what the script made.

AdamW (and Adam without an L2 term, which is the same) of torch or of this package runs as `TieredAdamW`, on the device
or host tier. Any other class, also one that derives from AdamW or bears its name, runs itself, on the shards, on the
device (`heavylift.api.torch_step`): what its `step` computes only it knows. Parameter groups given as dictionaries stay
the same objects, so that a scheduler made before `initialize` goes on working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heavylift.api.optimizers import DeepSpeedCPUAdam, FusedAdam
from heavylift.config.deepspeed.settings import OptimizerSettings, Settings
from heavylift.config.deepspeed.training import NO_CORRECTION_WITH_L2, REFUSED_OPTIMIZERS
from heavylift.config.schema import Tier
from heavylift.errors import UserError
from heavylift.offload.optimizer import TieredAdamW

ADAM_NAMES = ("adam", "adamw")
_ADAM_CLASSES = (torch.optim.AdamW, torch.optim.Adam, FusedAdam, DeepSpeedCPUAdam, TieredAdamW)
_DECOUPLED_CLASSES = (torch.optim.AdamW, TieredAdamW)


@dataclass
class OptimizerChoice:
    """What to build once the model is sharded. Group dictionaries hold the model's parameters from before that."""

    param_groups: list[dict[str, Any]]
    client: torch.optim.Optimizer | None
    """The script's own optimizer object, None where the configuration describes it."""
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None
    """A class of torch.optim to build from the configuration; None: `TieredAdamW`, or the client itself."""
    tiered: bool
    """Whether `TieredAdamW` takes the groups over."""

    def remember_names(self, model: nn.Module) -> list[list[str]]:
        """The parameters' names, group by group: sharding replaces the objects, and the groups let go of them.

        Raises UserError for parameters that are not the model's, or in two groups.
        """
        name_of = {param: name for name, param in model.named_parameters()}
        names: list[list[str]] = []
        num_strangers = 0
        for group in self.param_groups:
            own = [name_of.get(param) for param in group["params"]]
            num_strangers += own.count(None)
            names.append([name for name in own if name is not None])
        if num_strangers:
            raise UserError(
                f"optimizer: {num_strangers} of its parameters are not the model's; give initialize() the module that "
                "owns them, and make the optimizer after the model has its final parameters"
            )
        twice = [name for group in names for name in group]
        if len(set(twice)) < len(twice):
            raise UserError("model_parameters: a parameter is in more than one group; keep it in one")
        for group in self.param_groups:
            group["params"] = []  # nothing holds whole parameters while they are sharded
        return names

    def follow(self, model: nn.Module, names: list[list[str]]) -> None:
        """Puts the sharded parameters into the groups. In place, for whoever else holds these dictionaries."""
        params = dict(model.named_parameters())
        for group, group_names in zip(self.param_groups, names, strict=True):
            group["params"] = [params[name] for name in group_names]


def choose_optimizer(
    model: nn.Module, client: Any, model_parameters: Any, settings: Settings
) -> OptimizerChoice | None:
    """The optimizer of a run: the script's own (an object or a callable) before the configuration's; None without any.

    Raises UserError for what cannot be trained with, and for another class than Adam with offload.
    """
    offloads = settings.offload.tier is Tier.HOST
    if client is not None:
        if not isinstance(client, torch.optim.Optimizer) and callable(client):
            client = client(_parameters_or_all(model, model_parameters))
        if not isinstance(client, torch.optim.Optimizer):
            raise UserError(
                f"initialize: optimizer= should be a torch.optim.Optimizer or a function that makes one, got "
                f"{type(client).__name__}"
            )
        _check_client(client)
        if _has_stepped(client):
            raise UserError(
                "optimizer: it has state from earlier steps, which initialize() cannot take over; pass it before its "
                "first step, and restore training with engine.load_checkpoint()"
            )
        client.state.clear()  # of the whole parameters
        tiered = is_plain_adamw(client)
        if offloads and not tiered:
            raise UserError(
                f"optimizer: {_describe(client)} cannot run on the host; use torch.optim.AdamW (or Adam without "
                'weight decay), or set zero_optimization.offload_optimizer.device to "none"'
            )
        _check_trainable(client.param_groups)
        return OptimizerChoice(client.param_groups, client, None, tiered)
    if settings.optimizer is None:
        return None
    return _from_settings(model, model_parameters, settings.optimizer, offloads)


def _check_client(client: torch.optim.Optimizer) -> None:
    """Raises UserError for a class of torch.optim that cannot step shards as they are, or options that cannot."""
    for cls in type(client).__mro__:
        instead = REFUSED_OPTIMIZERS.get(cls.__name__.lower())
        if instead is not None and cls.__module__.startswith("torch.optim"):
            raise UserError(f"optimizer: heavylift does not have torch.optim.{cls.__name__}; {instead}")
    # torch has kernels over shards for Adam alone. FusedAdam and DeepSpeedCPUAdam have no such option: Accelerate makes
    # them from the groups of a torch AdamW, which say what that one was made with
    adam = isinstance(client, (torch.optim.Adam, *_ADAM_CLASSES))
    fused = not adam and any(group.get("fused") for group in client.param_groups)
    for option, given in (
        ("fused", fused),
        ("differentiable", any(group.get("differentiable") for group in client.param_groups)),
    ):
        if given:
            raise UserError(f"optimizer: {option}=True of {type(client).__name__} does not take shards; leave it out")


def _has_stepped(client: torch.optim.Optimizer) -> bool:
    """Adagrad's state is there from the start, with 0 steps."""
    return any(float(state.get("step", 1)) != 0 for state in client.state.values())


def renew_states(optimizer: torch.optim.Optimizer) -> None:
    """Of the parameters that it steps now: Adagrad makes its states when it is made, before there are masters."""
    if isinstance(optimizer, torch.optim.Adagrad):
        start = optimizer.defaults["initial_accumulator_value"]
        fresh = torch.optim.Adagrad(optimizer.param_groups, initial_accumulator_value=start)
        optimizer.state.clear()
        optimizer.state.update(fresh.state)


def _from_settings(
    model: nn.Module, model_parameters: Any, settings: OptimizerSettings, offloads: bool
) -> OptimizerChoice:
    groups = as_groups(_parameters_or_all(model, model_parameters))
    _check_trainable(groups)
    adam = settings.name.lower() in ADAM_NAMES
    decays = settings.weight_decay != 0 or any(group.get("weight_decay", 0) for group in groups)
    coupled = adam and decays and not settings.decoupled
    if coupled and not settings.bias_correction:
        raise UserError(NO_CORRECTION_WITH_L2)
    if adam and not coupled and not settings.more:
        defaults = {
            "lr": settings.lr,
            "betas": settings.betas,
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
            "bias_correction": settings.bias_correction,
        }
        for group in groups:
            for key, value in defaults.items():
                group.setdefault(key, value)
        return OptimizerChoice(groups, None, None, tiered=True)
    if offloads:
        what = "Adam with an L2 term (adam_w_mode false)" if adam else settings.name
        raise UserError(
            f"optimizer: {what} cannot run on the host; use AdamW, or set zero_optimization.offload_optimizer.device "
            'to "none"'
        )
    return OptimizerChoice(groups, None, _torch_maker(settings), tiered=False)


def _torch_maker(settings: OptimizerSettings) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    """Builds the class of torch.optim whose name, in any case, is `settings.name`."""
    classes = {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    name = "adamw" if settings.name == "adam" and settings.decoupled else settings.name.lower()
    if name not in classes:
        raise UserError(f"optimizer.type: {settings.name} is neither adam, adamw nor a class of torch.optim")
    more = dict(settings.more)
    if name in ADAM_NAMES:
        more |= {"lr": settings.lr, "weight_decay": settings.weight_decay}
        more |= {"betas": settings.betas, "eps": settings.eps}

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        try:
            return classes[name](groups, **more)
        except (TypeError, ValueError) as error:
            raise UserError(f"optimizer.params: torch.optim.{classes[name].__name__} refuses them: {error}") from None

    return make


def _parameters_or_all(model: nn.Module, model_parameters: Any) -> list[Any]:
    if model_parameters is None:
        return [p for p in model.parameters() if p.requires_grad]
    if isinstance(model_parameters, (torch.Tensor, str, dict)) or not isinstance(model_parameters, Iterable):
        raise UserError(
            "initialize: model_parameters= should be a list of parameters or of groups ({'params': [...]}), got "
            f"{type(model_parameters).__name__}"
        )
    given = list(model_parameters)
    if not any(not isinstance(p, dict) or not _is_empty(p.get("params", p)) for p in given):
        raise UserError(
            "initialize: model_parameters= is empty, or a generator that is used up (it gives its parameters once); "
            "pass list(model.parameters())"
        )
    return given


def _is_empty(params: Any) -> bool:
    return isinstance(params, (list, tuple)) and not params


def as_groups(params: list[Any]) -> list[dict[str, Any]]:
    """Parameter groups, each a dictionary with a list of parameters. Names that come along are left out."""
    if all(isinstance(p, dict) for p in params) and params:
        for group in params:
            if "params" not in group:
                raise UserError("model_parameters: a group has no 'params'; each is {'params': [...], 'lr': ...}")
            given = group["params"]
            group["params"] = [given] if isinstance(given, torch.Tensor) else [_unnamed(p) for p in given]
        return params
    return [{"params": [_unnamed(p) for p in params]}]


def _unnamed(param: Any) -> nn.Parameter:
    if isinstance(param, tuple) and len(param) == 2:
        param = param[1]
    if not isinstance(param, nn.Parameter):
        raise UserError(f"model_parameters: expected parameters, found a {type(param).__name__}")
    return param


def _check_trainable(groups: list[dict[str, Any]]) -> None:
    if not any(param.requires_grad for group in groups for param in group["params"]):
        raise UserError("model: no parameter has requires_grad; unfreeze what should be trained")


def is_plain_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` computes what `TieredAdamW` does: AdamW, or Adam where no group has an L2 term."""
    if type(optimizer) not in _ADAM_CLASSES:
        return False
    for group in optimizer.param_groups:
        if group.get("amsgrad") or group.get("maximize"):
            return False
        # FusedAdam's groups say adam_w_mode, torch's Adam's decoupled_weight_decay
        decoupled = type(optimizer) in _DECOUPLED_CLASSES or group.get("decoupled_weight_decay", False)
        if not group.get("adam_w_mode", decoupled) and group.get("weight_decay", 0) != 0:
            return False
    return True


def note_on(client: torch.optim.Optimizer) -> str | None:
    """What to say about a script's optimizer that looks like one that is taken over and is not."""
    looks_alike = isinstance(client, _ADAM_CLASSES) or type(client).__name__ in {one.__name__ for one in _ADAM_CLASSES}
    if type(client) in _ADAM_CLASSES or not looks_alike:
        return None
    return (
        f"optimizer: {_describe(client)} is not torch.optim's class, so its own step runs, with its states on the "
        "device; pass torch.optim.AdamW for heavylift's"
    )


def _describe(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    if kind in _ADAM_CLASSES:
        return f"{kind.__name__} with an L2 term or options of its own"
    # a name alone may be that of a class that could
    return kind.__name__ if kind.__module__.startswith("torch.optim") else f"{kind.__module__}.{kind.__qualname__}"
