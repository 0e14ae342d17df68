"""`optimizer.params` of the classes of torch.optim: their arguments, with torch's defaults and bounds.

Every class here steps each element by itself, without a closure, on the shards as they are. No torch here; a test
compares names and defaults with torch.optim's.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from heavylift.config.deepspeed.keys import Block, Number, Switch, done, refused

Decay = Annotated[Number, Field(ge=0, lt=1)]
"""Of a moving average."""
AtLeast0 = Annotated[Number, Field(ge=0)]

_LR = "Learning rate."
_BETAS = "Decay of the two moments."
_EPS = "Added to the denominator."
_DECOUPLED = "Decay as in AdamW, instead of in the gradient."
_SHARDS = "remove it: parameters are sharded, and it takes whole ones"


class TorchParams(Block):
    """Arguments that every class has."""

    weight_decay: Annotated[AtLeast0, done("L2 term, added to the gradient.")] = 0.0
    maximize: Annotated[Switch, done("Upwards.")] = False
    foreach: Annotated[Switch | None, done("One call for all parameters, or one for each.", there="torch's choice")] = (
        None
    )
    differentiable: Annotated[Switch, refused("remove it: nothing differentiates through a step")] = False
    max_grad_norm: Annotated[Number, refused("use the top-level key gradient_clipping", agrees=())] = 0.0


class _Capturable(TorchParams):
    capturable: Annotated[Switch, refused("remove it: steps are not captured in CUDA graphs")] = False


class _Fused(TorchParams):
    fused: Annotated[Switch | None, refused(_SHARDS)] = None


class Adadelta(_Capturable):
    """`optimizer.params` of Adadelta."""

    lr: Annotated[AtLeast0, done(_LR)] = 1.0
    rho: Annotated[Number, Field(ge=0, le=1), done("Decay of the mean of squared gradients.")] = 0.9
    eps: Annotated[AtLeast0, done(_EPS)] = 1e-6


class Adagrad(_Fused):
    """`optimizer.params` of Adagrad."""

    lr: Annotated[AtLeast0, done(_LR)] = 1e-2
    lr_decay: Annotated[AtLeast0, done("Decay of the rate.")] = 0.0
    initial_accumulator_value: Annotated[AtLeast0, done("Where the sum of squares starts.")] = 0.0
    eps: Annotated[AtLeast0, done(_EPS)] = 1e-10


class Adamax(_Capturable):
    """`optimizer.params` of Adamax."""

    lr: Annotated[AtLeast0, done(_LR)] = 2e-3
    betas: Annotated[tuple[Decay, Decay], done(_BETAS)] = (0.9, 0.999)
    eps: Annotated[AtLeast0, done(_EPS)] = 1e-8


class ASGD(_Capturable):
    """`optimizer.params` of ASGD."""

    lr: Annotated[AtLeast0, done(_LR)] = 1e-2
    lambd: Annotated[AtLeast0, done("Decay term.")] = 1e-4
    alpha: Annotated[AtLeast0, done("Power of the rate's decay.")] = 0.75
    t0: Annotated[AtLeast0, done("Step from which it averages.")] = 1e6


class NAdam(_Capturable):
    """`optimizer.params` of NAdam."""

    lr: Annotated[AtLeast0, done(_LR)] = 2e-3
    betas: Annotated[tuple[Decay, Decay], done(_BETAS)] = (0.9, 0.999)
    eps: Annotated[AtLeast0, done(_EPS)] = 1e-8
    momentum_decay: Annotated[AtLeast0, done("Decay of the momentum.")] = 4e-3
    decoupled_weight_decay: Annotated[Switch, done(_DECOUPLED)] = False


class RAdam(_Capturable):
    """`optimizer.params` of RAdam."""

    lr: Annotated[AtLeast0, done(_LR)] = 1e-3
    betas: Annotated[tuple[Decay, Decay], done(_BETAS)] = (0.9, 0.999)
    eps: Annotated[AtLeast0, done(_EPS)] = 1e-8
    decoupled_weight_decay: Annotated[Switch, done(_DECOUPLED)] = False


class RMSprop(_Capturable):
    """`optimizer.params` of RMSprop."""

    lr: Annotated[AtLeast0, done(_LR)] = 1e-2
    alpha: Annotated[AtLeast0, done("Decay of the mean of squared gradients.")] = 0.99
    eps: Annotated[AtLeast0, done(_EPS)] = 1e-8
    momentum: Annotated[AtLeast0, done("Momentum.")] = 0.0
    centered: Annotated[Switch, done("Divide by the variance instead of the mean square.")] = False


class SGD(_Fused):
    """`optimizer.params` of SGD."""

    lr: Annotated[AtLeast0, done(_LR)] = 1e-3
    momentum: Annotated[AtLeast0, done("Momentum.")] = 0.0
    dampening: Annotated[AtLeast0, done("Dampening of the momentum.")] = 0.0
    nesterov: Annotated[Switch, done("Nesterov's momentum; needs `momentum`, without `dampening`.")] = False


TORCH_OPTIMIZERS: dict[str, type[TorchParams]] = {
    block.__name__: block for block in (Adadelta, Adagrad, Adamax, ASGD, NAdam, RAdam, RMSprop, SGD)
}
