"""Models on the meta device whose values `initialize` makes once they are sharded: each rank has its own slices only.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    zero.set_weights_source(model, FOLDER)                 # or RandomWeights(std=0.02, seed=0)
    engine, *_ = heavylift.initialize(model=model, config=...)

Beside `zero.Init`, which runs a model's own constructor, this needs neither time nor memory to build a model and reads
each byte of a checkpoint on one rank. Left out: models whose buffers cannot be computed again (see
`set_weights_source`), checkpoints whose tensors transformers cuts or computes anew while loading.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from torch import nn

from heavylift.errors import UserError
from heavylift.models.load import copy_box, init_random_weights, load_weights, local_slice, materialise
from heavylift.models.stored import StoredTensor, check_weights


@dataclass(frozen=True)
class RandomWeights:
    """Matrices normal(0, `std`), norm weights one, biases zero; other values for another number of shards."""

    std: float = 0.02
    seed: int = 0


class WeightsSource:
    """Where the values of one model on the meta device come from."""

    def __init__(self, model: nn.Module, source: Path | RandomWeights) -> None:
        self._source = source
        self._stored: dict[str, tuple[StoredTensor, ...]] = {}
        if isinstance(source, Path):
            self._stored = check_weights(model, source)

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Allocates the sharded model's parameters and buffers on `device` and gives them their values."""
        materialise(model, device)
        if isinstance(self._source, RandomWeights):
            init_random_weights(model, self._source.std, self._source.seed)
        else:
            load_weights(model, self._source, self._stored)

    def read_masters(self, params: dict[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, this rank's values in the files, float32, flat), one parameter at a time; nothing for random weights,
        which are drawn in the dtype that trains."""
        wanted = [(n, sorted(pieces, key=lambda each: each.path)) for n, pieces in self._stored.items() if n in params]
        with ExitStack() as stack:
            opened: Path | None = None
            for name, pieces in sorted(wanted, key=lambda each: each[1][0].path):
                local, where = local_slice(params[name])
                if local.numel() == 0:
                    continue
                values = torch.empty(local.shape, dtype=torch.float32)
                for piece in pieces:
                    if piece.path != opened:
                        stack.close()
                        file, opened = stack.enter_context(safe_open(piece.path, framework="pt")), piece.path
                    copy_box(file, piece, values, where)
                yield name, values.flatten()


_sources: WeakKeyDictionary[nn.Module, WeightsSource] = WeakKeyDictionary()


def set_weights_source(model: nn.Module, source: str | os.PathLike[str] | RandomWeights) -> nn.Module:
    """Says where `initialize` takes the values of `model` from, all of whose parameters are on the meta device.

    `source`: a folder with *.safetensors, whose names, shapes and completeness are checked now, or `RandomWeights`.
    A parameter's dtype on the meta device is that in which the script wants it loaded: where the configuration trains
    in fewer bits, the float32 masters get the values of the files. Returns the model.

    Raises UserError for a model with values already, files that do not fit it, and buffers that no file holds and
    nothing computes: that takes a transformers model, whose `_init_weights` does.
    """
    placed = [name for name, param in model.named_parameters() if not param.is_meta]
    if placed:
        raise UserError(
            f"zero.set_weights_source: parameter {placed[0]} has values on {model.get_parameter(placed[0]).device}; "
            'build the model inside `with torch.device("meta"):`'
        )
    if not callable(getattr(model, "_init_weights", None)) and any(
        m._non_persistent_buffers_set for m in model.modules()
    ):
        raise UserError(
            f"zero.set_weights_source: {type(model).__name__} has buffers that no checkpoint holds, and no "
            "_init_weights(module) to compute them; build it under zero.Init() instead"
        )
    if not isinstance(source, RandomWeights):
        source = Path(source)
        if not any(source.glob("*.safetensors")):
            raise UserError(f"zero.set_weights_source: {source}: expected a folder with *.safetensors files")
    _sources[model] = WeightsSource(model, source)
    return model


def find_source(model: nn.Module) -> WeightsSource | None:
    """What `set_weights_source` was told of this model."""
    return _sources.get(model)
