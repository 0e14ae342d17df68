"""The logger."""

from heavylift.api.logs import (
    get_current_level,
    log_dist,
    log_levels,
    logger,
    print_rank_0,
    set_log_level_from_string,
    should_log_le,
)

__all__ = [
    "get_current_level",
    "log_dist",
    "log_levels",
    "logger",
    "print_rank_0",
    "set_log_level_from_string",
    "should_log_le",
]
