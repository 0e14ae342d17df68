"""A loss that does not come from the engine's model is refused before any collective; every other one is not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from parity_api.models import make_llama
from parity_api.runs import Case, ds_config, train
from parity_api.small import message_of, rows
from ranks.pool import run_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import heavylift


class Layered(nn.Module):
    """Two layers that are gathered one by one, the second of them recomputed, and a loss beside forward."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, reentrant: bool = False) -> torch.Tensor:
        hidden = self.layers[0](x)
        return checkpoint(self.layers[1], hidden, use_reentrant=reentrant) * self.factor

    def penalty(self, x: torch.Tensor) -> torch.Tensor:
        return (self.factor * x).sum()


def losses_job(stage: int, frozen: str) -> tuple[int, list[str], int]:
    """Losses that come from the model in every way; then, on rank 1 alone, some that do not; then one more step."""
    model = Layered()
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen.split())
    config = ds_config(Case("layered", stage, "none", "fp32", 4), 2)
    engine, *_ = heavylift.initialize(model=model, config=config)
    x = rows(2)[0]
    if "factor" not in frozen and stage == 3:
        # before any forward: nothing but the method has gathered the parameters
        engine.backward(engine.penalty(x))
    for make in (lambda: engine(x), lambda: engine(x, reentrant=True), lambda: engine(x) + engine(x)):
        engine.backward(make().mean())
        engine.set_gradient_accumulation_boundary(False)
        engine.step()
    first, second = engine(x).mean(), engine(x).square().mean()
    engine.backward(first)
    engine.backward(second)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    steps = engine.global_steps
    other, own = nn.Linear(5, 1), torch.ones((), requires_grad=True)
    messages = []
    if dist.get_rank() == 1:
        messages = [message_of(lambda loss=loss: engine.backward(loss)) for loss in (other(x).sum(), own, own * 2)]
    engine.backward(engine(x).mean() + other(x).sum() + own)
    engine.step()
    engine.destroy()
    return steps, messages, engine.global_steps - steps


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("frozen", ["", "factor layers.1.weight layers.1.bias", "layers.0.weight"])
def test_only_losses_of_the_model_are_taken(stage: int, frozen: str) -> None:
    calm, mistaken = run_on_ranks(2, losses_job, stage, frozen, timeout_s=60)
    assert calm == (1, [], 1)
    text = "backward: the loss depends on no trained parameter; run forward with gradients, through engine(...)"
    assert mistaken == (1, [text] * 3, 1)


def ones_job() -> str:
    """A whole step of a loss from nowhere, on every rank."""
    engine, *_ = heavylift.initialize(model=Layered(), config=ds_config(Case("layered", 3, "cpu", "bf16"), 2))
    message = message_of(lambda: engine.backward(nn.Linear(5, 1)(rows(2)[0]).sum()))
    after = message_of(engine.step)
    assert engine.global_steps == 0 and not engine.was_step_applied(), "nothing has been stepped"
    engine.destroy()
    return message + " | " + after


def test_a_loss_from_elsewhere_is_no_step() -> None:
    for message in run_on_ranks(2, ones_job):
        assert message.startswith("backward: the loss depends on no trained parameter")
        assert "| step: no backward since the last step" in message


def compiled_last_job(eager: bool) -> list[float]:
    """Only the last layer is trained, and it is compiled whole: by a backend, or one time or another run as written."""
    model = make_llama()
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    with torch.compiler.set_stance("force_eager" if eager else "default"):
        engine, *_ = heavylift.initialize(model=model, config=ds_config(Case("llama", 3, "cpu"), dist.get_world_size()))
        losses = train(engine, "llama", "fp32", 1).losses
        engine.destroy()
    return list(losses)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_compiled_layer_that_runs_as_it_is_written(ranks: int) -> None:
    compiled, eager = (run_on_ranks(ranks, compiled_last_job, flag)[0] for flag in (False, True))
    assert eager == pytest.approx(compiled, rel=1e-5) and len(eager) > 1
