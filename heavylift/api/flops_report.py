"""The text of a profile: a summary, what costs most at each depth, and the modules as a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heavylift.api.flops_text import duration_to_string, flops_to_string, macs_to_string, params_to_string

_WIDTH = 88


@dataclass(frozen=True)
class ModuleCost:
    """One module, what is inside of it included."""

    name: str
    """As in `named_modules`; empty for the model."""
    kind: str
    """Name of its class."""
    depth: int
    num_params: int
    flops: int
    """Of all its forwards."""
    duration_s: float


@dataclass(frozen=True)
class EngineFacts:
    """Sizes of the run that the profile was taken in."""

    world_size: int
    micro_batch: int
    accumulation: int


@dataclass
class _Sum:
    num_params: int = 0
    flops: int = 0
    duration_s: float = 0.0


_MEASURES: dict[str, tuple[Callable[[_Sum], float], Callable[[float], str]]] = {
    "params": (lambda one: one.num_params, params_to_string),
    "MACs": (lambda one: one.flops // 2, macs_to_string),
    "latency": (lambda one: one.duration_s, duration_to_string),
}


@dataclass(frozen=True)
class ProfileReport:
    """A profile to be told. `costs`: the model first."""

    costs: Sequence[ModuleCost]
    step: int
    recompute_fwd_factor: float = 0.0
    engine: EngineFacts | None = None

    def text(self, *, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> str:
        """The report; the arguments are those of `FlopsProfiler.print_model_profile`."""
        deepest = max(cost.depth for cost in self.costs)
        depth = deepest if module_depth < 0 else min(module_depth, deepest)
        blocks = [self._summary(), self._aggregate(depth, max(1, top_modules))]
        if detailed:
            blocks.append(self._tree(depth))
        title = f" flops profile, step {self.step} "
        return "\n\n".join([title.center(_WIDTH, "-"), *blocks, "-" * _WIDTH])

    def _summary(self) -> str:
        model = self.costs[0]
        backward = model.flops * (2 + self.recompute_fwd_factor)
        rows = {}
        if self.engine is not None:
            rows["processes"] = str(self.engine.world_size)
            rows["samples per process and forward"] = str(self.engine.micro_batch)
            rows["forwards per optimizer step"] = str(self.engine.accumulation)
        rows |= {
            "parameters": params_to_string(model.num_params),
            "forward MACs per process": macs_to_string(model.flops // 2),
            "forward FLOPs per process": flops_to_string(model.flops),
            "backward FLOPs per process, estimated": flops_to_string(backward),
            "forward latency (slowed by the profiler)": duration_to_string(model.duration_s),
            "forward FLOPs per second": _rate(model.flops, model.duration_s),
        }
        if self.engine is not None:
            step_flops = (model.flops + backward) * self.engine.accumulation * self.engine.world_size
            rows["optimizer step, all processes, estimated"] = flops_to_string(step_flops)
        width = max(map(len, rows))
        return "\n".join(f"{key:<{width}}  {value}" for key, value in rows.items())

    def _aggregate(self, deepest: int, top: int) -> str:
        lines = ["Which classes of modules cost most, by depth:"]
        for depth in range(deepest + 1):
            sums: dict[str, _Sum] = {}
            for cost in self.costs:
                if cost.depth == depth:
                    one = sums.setdefault(cost.kind, _Sum())
                    one.num_params += cost.num_params
                    one.flops += cost.flops
                    one.duration_s += cost.duration_s
            lines.append(f"depth {depth}:")
            for name, (measure, words) in _MEASURES.items():
                best = sorted(sums.items(), key=lambda item: measure(item[1]), reverse=True)[:top]
                lines.append(f"  {name:<8}" + ", ".join(f"{kind} {words(measure(one))}" for kind, one in best))
        return "\n".join(lines)

    def _tree(self, deepest: int) -> str:
        model = self.costs[0]
        lines = ["Every module: parameters, MACs, latency (share of the model), FLOPs per second"]
        for cost in self.costs:
            if cost.depth > deepest:
                continue
            cells = [
                f"{params_to_string(cost.num_params)} ({_share(cost.num_params, model.num_params)})",
                f"{macs_to_string(cost.flops // 2)} ({_share(cost.flops, model.flops)})",
                f"{duration_to_string(cost.duration_s)} ({_share(cost.duration_s, model.duration_s)})",
                _rate(cost.flops, cost.duration_s),
            ]
            name = cost.name.rsplit(".", 1)[-1]
            label = f"({name}) {cost.kind}" if name else cost.kind
            lines.append("  " * cost.depth + label + ": " + ", ".join(cells))
        return "\n".join(lines)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"


def _rate(flops: int, duration_s: float) -> str:
    return flops_to_string(flops / duration_s if duration_s > 0 else 0.0)
