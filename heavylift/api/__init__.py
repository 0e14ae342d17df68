"""What a training script calls: `initialize`, the engine, schedulers, timers, profiler, by DeepSpeed's names."""
