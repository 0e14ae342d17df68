"""The launcher's names. It is `heavylift launch`."""

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME"]
