"""What a training script calls: `initialize`, the engine, schedulers, timers, profiler, in the ways of DeepSpeed users."""
