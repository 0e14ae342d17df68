"""Layers that cannot be compiled run as they are written, and a run does not notice."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.families import VOCAB, save_family
from ranks.gather import whole
from ranks.plain import make_steps
from ranks.pool import run_on_ranks
from ranks.sharded import CPU, Setup, param_groups, take_step
from torch import nn

from heavylift.config.schema import ModelConfig, Schedule, Tier, TrainConfig
from heavylift.engine import Engine, build_optimizer
from heavylift.errors import UserError
from heavylift.memory.boundaries import BoundaryStore
from heavylift.memory.checkpointing import checkpoint_layers
from heavylift.models.compiled import compile_layers
from heavylift.models.load import build_on_meta, load_hf_config, load_weights, materialise
from heavylift.offload.options import TieredOptions
from heavylift.sharding import layers_of, make_mesh, shard_model
from heavylift.train.setup import compiles_layers, prepare_layers

STEPS = make_steps(3, VOCAB)


class Double(nn.Module):
    """A layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def break_graph(layer: nn.Module) -> None:
    """Has the layer's MLP do what no compiler takes into a graph."""
    forward = layer.mlp.forward

    def broken(*args: Any) -> Any:
        torch._dynamo.graph_break()
        return forward(*args)

    layer.mlp.forward = broken


def train_job(folder: Path, stage: int, how: str) -> dict[str, Any]:
    """Losses, weights and what was said, of layers that are `eager`, or `compiled` as far as they can be."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("heavylift").addHandler(handler)
    try:
        model = build_on_meta(load_hf_config(folder, False), ModelConfig(model_name_or_path=str(folder)), torch.float32)
        layers = layers_of(model)
        checkpointed = checkpoint_layers(layers)
        if how == "compiled":
            for layer in layers:
                break_graph(layer)
            compile_layers(layers, or_eager=True)
        store = BoundaryStore(len(layers), 2**20, CPU)
        for layer in checkpointed:
            store.attach(layer)
        sharded = shard_model(model, stage, make_mesh(stage, "cpu"))
        materialise(model, CPU)
        load_weights(model, folder)
        options = TieredOptions(tier=Tier.HOST, schedule=Schedule.DEFERRED)
        optimizer = build_optimizer(
            sharded, param_groups(model, Setup()), options, lr=1e-3, betas=(0.9, 0.999), eps=1e-8
        )
        engine = Engine(sharded, optimizer, CPU)
        losses = [take_step(engine, rows).loss for rows in STEPS]
        optimizer.synchronize()
        weights = {name: whole(p) for name, p in model.named_parameters()}
        optimizer.close()
    finally:
        logging.getLogger("heavylift").removeHandler(handler)
    return {"losses": losses, "weights": weights, "said": said}


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 3)])
def test_the_run_goes_on_with_the_bits_of_uncompiled_layers(num_ranks: int, stage: int, tmp_path: Path) -> None:
    """With gates, recomputation and inputs on the host around the layers."""
    folder = save_family("granite", tmp_path / "model")
    eager = run_on_ranks(num_ranks, train_job, folder, stage, "eager")
    compiled = run_on_ranks(num_ranks, train_job, folder, stage, "compiled")
    assert compiled[0]["losses"] == eager[0]["losses"]
    for name, weight in eager[0]["weights"].items():
        assert torch.equal(compiled[0]["weights"][name], weight), name
    assert all(rank["said"] == [] for rank in eager)
    [line] = compiled[0]["said"]
    assert line.startswith("train.compile: the layers run as they are written, slower")
    assert all(rank["said"] == [] for rank in compiled[1:])


def test_asked_for_the_compilers_error_comes_out() -> None:
    from torch._dynamo.exc import TorchDynamoException

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x

    layer = Broken()
    compile_layers([layer], or_eager=False)
    with pytest.raises(TorchDynamoException):
        layer(torch.ones(1, 2))


def test_other_errors_of_a_layer_are_its_own() -> None:
    """And the layers that did not fail stay compiled."""
    layers = [Double(), Double()]
    calls: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(len(calls))
            if len(calls) == 1:
                raise RuntimeError("out of luck")
            return graph.forward(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", compile_with(backend))
        compile_layers(layers, or_eager=True)
    with pytest.raises(RuntimeError, match="out of luck"):
        layers[0](torch.ones(1, 2))
    layers[1](torch.ones(1, 2))
    assert len(calls) == 2


def compile_with(backend: Any) -> Any:
    """`nn.Module.compile` with another backend."""
    compile_module = nn.Module.compile
    return lambda module, **options: compile_module(module, backend=backend, **options)


def test_a_family_that_writes_into_its_weights_is_known(tmp_path: Path) -> None:
    folder = save_family("gemma3n", tmp_path / "model")
    model = build_on_meta(load_hf_config(folder, False), ModelConfig(model_name_or_path=str(folder)), torch.float32)
    gpu = torch.device("cuda")
    assert not compiles_layers(TrainConfig(output_dir="unused"), gpu, model)
    assert not compiles_layers(TrainConfig(output_dir="unused", compile=False), gpu, model)
    with pytest.raises(UserError) as caught:
        prepare_layers(model, TrainConfig(output_dir="unused", compile=True), CPU)
    [line] = caught.value.problems
    assert line.startswith("train.compile: layers of gemma3n_text write into their weights and cannot be compiled; ")
