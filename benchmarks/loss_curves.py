"""The loss of one small model, trained from scratch by every schedule: do the curves lie on each other?

    python benchmarks/loss_curves.py --out benchmarks/results/loss_curves.json [--steps 300] [--dtype float32,bfloat16]

A Llama of 0.4 million parameters learns the bytes of the text in examples/data, with gradient clipping that strikes
often, on the CPU, in one process. Each run starts from the same weights and sees the same batches; only where the
optimizer states lie and when they are stepped differs. `largest_difference` is that of a run's losses from those of the
run without offload in the same dtype and with as many micro-batches. The yardstick for it: the run without offload in 4
micro-batches, beside the one in 1, only adds the same numbers up in another order; and in float32 there is a plain
PyTorch loop with torch.optim.AdamW and clip_grad_norm_. A picture of the curves is written beside the JSON file.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from command_line import Parser, result_file, run, whole_number, write_result
from torch import nn

from heavylift.config.schema import Schedule, Tier
from heavylift.engine import Engine, build_optimizer, parameter_groups
from heavylift.models.load import init_random_weights, materialise
from heavylift.offload.options import TieredOptions
from heavylift.sharding import make_mesh, shard_model

ROOT = Path(__file__).parents[1]
SEQ, ROWS, SEED = 64, 16, 7
LR, BETAS, EPS, DECAY = 2e-3, (0.9, 0.95), 1e-8, 0.1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """Where the states lie, when they are stepped, in how many micro-batches the gradient comes."""

    tier: Tier = Tier.HOST
    schedule: Schedule = Schedule.SYNCHRONOUS
    ratio: float = 1.0
    accumulation: int = 1


CASES = {
    "no offload": Case(tier=Tier.DEVICE),
    "host, synchronous": Case(),
    "host, deferred": Case(schedule=Schedule.DEFERRED),
    "host, auto": Case(schedule=Schedule.AUTO),
    "host, speculative": Case(schedule=Schedule.SPECULATIVE),
    "60% host, auto": Case(schedule=Schedule.AUTO, ratio=0.6),
    "no offload, 4 micro-batches": Case(tier=Tier.DEVICE, accumulation=4),
    "host, auto, 4 micro-batches": Case(schedule=Schedule.AUTO, accumulation=4),
}
MICRO_BATCHES = "no offload, 4 micro-batches"
ON_HOST_IN_MICRO_BATCHES = [case for case in CASES.values() if case.accumulation > 1 and case.tier is Tier.HOST]
PLAIN = "plain PyTorch"


@dataclass(frozen=True)
class Rows:
    """int64 [rows, seq] each; every position has a label."""

    input_ids: torch.Tensor
    labels: torch.Tensor


@dataclass
class Curve:
    """What a run did; one number per step."""

    losses: list[float]
    grad_norms: list[float]
    num_clipped: int = 0
    num_stepped_in_backward: int = 0
    """Steps that the host took before the norm was known."""


def read_text() -> bytes:
    """The questions and answers of examples/data."""
    texts = []
    for path in sorted((ROOT / "examples" / "data").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            texts.append("\n".join(m["content"] for m in row["messages"]) if "messages" in row else row["output"])
    return "\n\n".join(texts).encode()


def batches(num_steps: int) -> list[Rows]:
    """`ROWS` pieces of the text per step, drawn with a seed."""
    data = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(SEED)
    steps = []
    for _ in range(num_steps):
        starts = torch.randint(0, len(data) - SEQ - 1, (ROWS,), generator=generator)
        pieces = torch.stack([data[start : start + SEQ + 1] for start in starts.tolist()])
        steps.append(Rows(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()))
    return steps


def build_model(dtype: torch.dtype) -> nn.Module:
    """On the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    model.config.use_cache = False
    return model


def train(case: Case, dtype: torch.dtype, steps: Sequence[Rows], clip: float) -> Curve:
    """One run of heavylift. A collective."""
    model, device = build_model(dtype), torch.device("cpu")
    sharded = shard_model(model, 3, make_mesh(3, "cpu"))
    materialise(model, device)
    init_random_weights(model, 0.02, SEED)
    options = TieredOptions(
        tier=case.tier,
        ratio=case.ratio,
        schedule=case.schedule,
        accumulate=case.accumulation > 1,
        max_grad_norm=clip,
    )
    optimizer = build_optimizer(sharded, parameter_groups(model, DECAY), options, lr=LR, betas=BETAS, eps=EPS)
    engine, curve = Engine(sharded, optimizer, device), Curve([], [])
    for rows in steps:
        parts = [Rows(*pair) for pair in zip(*(t.chunk(case.accumulation) for t in vars(rows).values()), strict=True)]
        result = engine.train_step(parts, rows.labels.numel())
        curve.losses.append(result.loss)
        curve.grad_norms.append(result.grad_norm)
        curve.num_clipped += result.grad_norm > clip
        curve.num_stepped_in_backward += optimizer.last_schedule is Schedule.SPECULATIVE
    optimizer.close()
    return curve


def train_plain(steps: Sequence[Rows], clip: float) -> Curve:
    """The same in float32 with nothing but PyTorch."""
    model = build_model(torch.float32)
    materialise(model, torch.device("cpu"))
    init_random_weights(model, 0.02, SEED)
    optimizer = torch.optim.AdamW(parameter_groups(model, DECAY), lr=LR, betas=BETAS, eps=EPS)
    curve = Curve([], [])
    for rows in steps:
        logits = model(input_ids=rows.input_ids).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, rows.labels.flatten())
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(float(loss.detach()))
        curve.grad_norms.append(norm)
        curve.num_clipped += norm > clip
    return curve


def reference_of(name: str) -> str:
    """The run that `name` is compared with."""
    return MICRO_BATCHES if name in CASES and CASES[name] in ON_HOST_IN_MICRO_BATCHES else "no offload"


def run_all(dtypes: Sequence[str], num_steps: int, clip: float) -> dict[str, Any]:
    """All cases in all dtypes. A collective."""
    steps, found = batches(num_steps), {}
    for dtype in dtypes:
        curves = {name: train(case, DTYPES[dtype], steps, clip) for name, case in CASES.items()}
        if dtype == "float32":
            curves[PLAIN] = train_plain(steps, clip)
        found[dtype] = {name: _described(name, curve, curves) for name, curve in curves.items()}
    return {
        "torch": torch.__version__,
        "num_steps": num_steps,
        "max_grad_norm": clip,
        "learning_rate": LR,
        "rows": ROWS,
        "seq": SEQ,
        "curves": found,
    }


def _described(name: str, curve: Curve, curves: dict[str, Curve]) -> dict[str, Any]:
    other = curves[reference_of(name)]
    apart = max(abs(a - b) for a, b in zip(curve.losses, other.losses, strict=True))
    return {"compared_with": reference_of(name), "largest_difference": apart, **asdict(curve)}


def plot(result: dict[str, Any], path: Path) -> None:
    """All losses on the left; on the right how far each run is from its reference."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dtypes = list(result["curves"])
    figure = Figure(figsize=(11, 3.6 * len(dtypes)), dpi=80, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for row, dtype in enumerate(dtypes):
        curves = result["curves"][dtype]
        left = figure.add_subplot(len(dtypes), 2, 2 * row + 1)
        right = figure.add_subplot(len(dtypes), 2, 2 * row + 2)
        for width, (name, curve) in zip(range(len(curves), 0, -1), curves.items(), strict=True):
            # the first ones wider, so that they show under those that lie on them
            left.plot(curve["losses"], linewidth=0.6 + 0.7 * width, alpha=0.6, label=name)
            reference = curves[curve["compared_with"]]["losses"]
            apart = [max(abs(a - b), 1e-9) for a, b in zip(curve["losses"], reference, strict=True)]
            if name != curve["compared_with"]:
                right.semilogy(apart, linewidth=0.9, label=name)
        left.set(title=f"{dtype}: loss", xlabel="step")
        right.set(title=f"{dtype}: distance from no offload (1e-9: equal)", xlabel="step")
        left.legend(fontsize=7)
        right.legend(fontsize=7)
    with open(path, "wb") as file:
        canvas.print_png(file)


def lists_in_lines(text: str) -> str:
    """JSON whose lists of numbers take one line each."""
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=result_file, required=True, help="JSON file; the picture gets the ending .png")
    parser.add_argument("--steps", type=whole_number, default=300)
    parser.add_argument("--dtype", default="float32,bfloat16", help="one or both of float32,bfloat16")
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    args = parser.parse_args()
    args.dtypes = args.dtype.split(",")
    if not set(args.dtypes) <= set(DTYPES):
        parser.error(f"argument --dtype: expected one or both of {', '.join(DTYPES)}, got {args.dtype!r}")
    if not 0 < args.max_grad_norm < math.inf:
        parser.error(f"argument --max-grad-norm: expected a number above 0, got {args.max_grad_norm:g}")
    return args


def main() -> int:
    """Runs all cases and writes the JSON file and the picture."""
    given = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        result = run_all(given.dtypes, given.steps, given.max_grad_norm)
        dist.destroy_process_group()
    write_result(given.out, lists_in_lines(json.dumps(result, indent=1)) + "\n")
    plot(result, given.out.with_suffix(".png"))
    for dtype, curves in result["curves"].items():
        for name, curve in curves.items():
            print(
                f"{dtype:<9} {name:<28} {curve['losses'][0]:.4f} -> {curve['losses'][-1]:.4f}  "
                f"clipped {curve['num_clipped']}, in backward {curve['num_stepped_in_backward']}, "
                f"largest difference {curve['largest_difference']:.2e}"
            )
    return 0


if __name__ == "__main__":
    run(main)
