"""DeepSpeed's names for what heavylift does not do: they can be imported, and say what to use when they are called.

So a script that imports them for one of its options runs as long as the option is not taken.
"""

from __future__ import annotations

from typing import Any, NoReturn

from heavylift.errors import UserError

_PIPELINE = "pipeline parallelism is not supported; train the plain module with ZeRO stage 3 through initialize()"
_EXPERTS = "expert parallelism is not supported; a mixture of experts trains with ZeRO stage 3 like any module"


class Refused:
    """A class that cannot be made: UserError tells why, and what to use."""

    why = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UserError(f"{type(self).__name__}: {self.why}")


class PipelineModule(Refused):
    """Refused."""

    why = _PIPELINE


class LayerSpec(Refused):
    """Refused."""

    why = _PIPELINE


class TiedLayerSpec(Refused):
    """Refused."""

    why = _PIPELINE


class PipelineEngine(Refused):
    """Refused."""

    why = _PIPELINE


class ProcessTopology(Refused):
    """Refused."""

    why = _PIPELINE


class PipeDataParallelTopology(Refused):
    """Refused."""

    why = _PIPELINE


class PipeModelDataParallelTopology(Refused):
    """Refused."""

    why = _PIPELINE


class PipelineParallelGrid(Refused):
    """Refused."""

    why = _PIPELINE


class MoE(Refused):
    """Refused."""

    why = _EXPERTS


class DeepSpeedTransformerLayer(Refused):
    """Refused."""

    why = "DeepSpeed's kernels are not here; use torch's scaled_dot_product_attention, or your model's own layer"


class InferenceEngine(Refused):
    """Refused."""

    why = "inference engines are not supported; call the model, or serve the saved folder with an inference server"


class DeepSpeedHybridEngine(Refused):
    """Refused."""

    why = "the hybrid engine is not supported; generate inside of zero.unwrap_model_for_generation(engine)"


def init_inference(*_: Any, **__: Any) -> NoReturn:
    """Refused."""
    raise UserError(f"init_inference: {InferenceEngine.why}")


def tp_model_init(*_: Any, **__: Any) -> NoReturn:
    """Refused."""
    raise UserError("tp_model_init: tensor parallelism is not supported; shard with ZeRO stage 3, and leave it out")
