"""The blocks of precision."""

from heavylift.api.config_object import get_bfloat16_config
from heavylift.config.deepspeed.precision import Bf16 as DeepSpeedBF16Config
from heavylift.config.deepspeed.precision import Fp16 as DeepSpeedFP16Config

__all__ = ["DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config"]
