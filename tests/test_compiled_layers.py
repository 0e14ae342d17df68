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
from heavylift.models.compiled import compile_layers, why_not_compilable
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


class Kind(nn.Module):
    """A layer of one kind of several: its graph is not that of the others."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 if self.training else 3) * x.flatten(0, 1).cumsum(0).view(x.shape) + self.kind


def run_kinds(monkeypatch: pytest.MonkeyPatch, *, or_eager: bool) -> int:
    """Three kinds of layers with shapes as a run has them: in training and in evaluation batches of several widths, and
    single samples. Returns the number of graphs."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()  # what other tests compiled counts too
    layers = [Kind(kind) for kind in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "compile", compile_with(backend))
        compile_layers(layers, or_eager=or_eager)
    for shape in [(2, 7), (2, 9), (4, 11), (1, 7), (1, 9)]:
        x = torch.ones(shape)
        for is_training in (True, False):
            for layer in layers:
                expected = (2 if is_training else 3) * x.flatten().cumsum(0).view(shape) + layer.kind
                assert torch.equal(layer.train(is_training)(x), expected)
    return len(graphs)


def test_layers_of_several_kinds_stay_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch's limit of eight graphs ended such runs, in the middle."""
    with torch._dynamo.config.patch(recompile_limit=8):
        assert run_kinds(monkeypatch, or_eager=True) > 8
    assert not [message for message in caplog.messages if message.startswith("train.compile")]


def test_too_many_graphs_are_the_compilers_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("heavylift.models.compiled.MAX_GRAPHS", 3)
    with torch._dynamo.config.patch(recompile_limit=3):
        assert run_kinds(monkeypatch, or_eager=True) == 3
        [line] = [message for message in caplog.messages if message.startswith("train.compile")]
        assert "cannot be compiled here: 3 graphs were not enough for the shapes of their inputs; " in line
        with pytest.raises(Exception, match="fullgraph") as caught:
            run_kinds(monkeypatch, or_eager=False)
        assert why_not_compilable(caught.value) == "3 graphs were not enough for the shapes of their inputs"


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
