"""The configuration."""

from heavylift.api.config_object import DeepSpeedConfig, get_gradient_clipping, get_log_level
from heavylift.errors import UserError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError", "get_gradient_clipping", "get_log_level"]
