"""The version of DeepSpeed whose names are here."""

from heavylift.compat import DEEPSPEED_VERSION

version = DEEPSPEED_VERSION
git_hash = git_branch = "heavylift"

__all__ = ["git_branch", "git_hash", "version"]
