"""Time DeepSpeed's ZeRO-3 on the shape of a config.json, to stand beside heavylift on the same machine.

    python -m deepspeed.launcher.runner --num_gpus 4 --bind_cores_to_rank --no_local_rank \\
        benchmarks/deepspeed_llama.py MODE SHAPE_FOLDER --micro-batch 4 --seq 4096 --clip 1.0 --steps 12 --warmup 6 \\
        --out result.json

MODE: `none` (ZeRO-3), `zero` (and ZeRO-Offload), `super` (and SuperOffload, with 90% of the optimizer on the host as
its examples have it). Random weights, random tokens, non-reentrant checkpointing of every layer, bf16, AdamW.
`--clip 0` turns clipping off: it is passed on, as DeepSpeed's own default is 1. Set TORCH_CUDA_ARCH_LIST=9.0 on Hopper.
One step is timed from before forward to after step(), with one synchronisation at each end. `compare_deepspeed.py`
calls this.

Left out: layer compilation and other attention kernels (the usual way to run DeepSpeed: eager, SDPA's own choice).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

GIB = 2**30


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("none", "zero", "super"))
    parser.add_argument("shape", type=Path, help="folder with config.json")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def deepspeed_config(mode: str, micro_batch: int, clip: float) -> dict[str, Any]:
    """DeepSpeed's JSON: bucket and sub-group sizes as in its SuperOffload examples."""
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": mode == "none",
        "reduce_bucket_size": 4e8,
        "sub_group_size": 4e8,
    }
    if mode in ("zero", "super"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if mode == "super":
        zero["offload_optimizer"] |= {"ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "gradient_clipping": clip,
    }
    if mode == "none":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-5}}
    return config


def build(args: argparse.Namespace) -> tuple[Any, Any, int]:
    """(engine, model config, number of parameters)."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = deepspeed_config(args.mode, args.micro_batch, args.clip)
    model_config = AutoConfig.from_pretrained(args.shape)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = None
    if args.mode != "none":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, model_config, sum(p.ds_numel for p in model.parameters())


def timed_steps(engine: Any, vocab: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """`args.steps` steps on random tokens, a new micro-batch each time."""
    import torch
    import torch.distributed as dist

    steps = []
    for step in range(args.steps):
        ids = torch.randint(0, vocab, (args.micro_batch, args.seq), device="cuda")
        torch.cuda.synchronize()
        dist.barrier()
        start_s = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        torch.cuda.synchronize()
        step_s = time.perf_counter() - start_s
        steps.append({"step": step + 1, "step_s": step_s, "loss": loss.item()})
        if dist.get_rank() == 0:
            print(f"step: {step + 1}  loss: {steps[-1]['loss']:.4f}  {step_s:.3f} s", flush=True)
    return steps


def main() -> None:
    """One run; rank 0 writes the result."""
    args = arguments()
    started_s = time.perf_counter()
    import deepspeed
    import psutil
    import torch
    import torch.distributed as dist

    from heavylift.train.flops import ModelShape, examples_flops, model_flops

    deepspeed.init_distributed()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    engine, model_config, num_params = build(args)
    start_to_first_step_s = time.perf_counter() - started_s
    steps = timed_steps(engine, model_config.vocab_size, args)
    # SuperOffload's CPU Adam runs in processes of its own
    me = psutil.Process()
    resident = sum(process.memory_info().rss for process in (me, *me.children(recursive=True)))
    memory = torch.tensor([torch.cuda.max_memory_allocated(), resident], dtype=torch.float64, device="cuda")
    peak_device = memory[:1].clone()
    dist.all_reduce(peak_device, op=dist.ReduceOp.MAX)
    dist.all_reduce(memory)
    if dist.get_rank() == 0:
        measured = [step["step_s"] for step in steps[args.warmup :]]
        median = statistics.median(measured)
        shape = ModelShape.from_config(model_config.to_dict(), num_params)
        counted = examples_flops(num_params, shape.num_layers, shape.hidden, args.seq, args.micro_batch)
        result = {
            "step_s": {"median": median, "min": min(measured), "max": max(measured)},
            "tflops": counted / median / 1e12,
            "model_tflops": model_flops(shape, [args.seq] * args.micro_batch) / median / 1e12,
            "tokens_per_s": args.micro_batch * args.seq * dist.get_world_size() / median,
            "start_to_first_step_s": start_to_first_step_s,
            "first_step_s": steps[0]["step_s"],
            "peak_device_gib": float(peak_device) / GIB,
            "host_gib_at_end": float(memory[1]) / GIB,
            "deepspeed": deepspeed.__version__,
            "config": deepspeed_config(args.mode, args.micro_batch, args.clip),
            "steps": steps,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    os._exit(0)  # SuperOffload's processes do not always end by themselves


if __name__ == "__main__":  # SuperOffload spawns processes that import this file
    main()
