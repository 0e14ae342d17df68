"""What a training script calls: `initialize`, the engine, schedulers, timers, profiler, by DeepSpeed's names."""

from heavylift.api import script_errors

# here, not in `initialize` alone: much that a script calls before it can raise a UserError
script_errors.install()
