"""Which runs are compared: every pair of factors at least once, and the runs that must be equal to the bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ranks.sharded import Setup

FREEZE = {
    "none": (),
    "layer": ("model.layers.0.*",),
    "start": ("model.embed_tokens.*", "model.layers.0.*"),  # no gradient flows into the first groups at all
    "parts": ("*norm*", "*.k_proj.*"),
}
# off; below every norm of these runs, so that it strikes; above all of them
CLIP = {"off": 0.0, "strikes": 0.05, "loose": 1e6}
TIERS = {"device": ("device", 1.0), "host": ("host", 1.0), "part": ("host", 0.37)}

FACTORS: dict[str, Sequence[Any]] = {
    "stage": (3, 2, 1, 0),
    "world": (4, 2, 1),
    "freeze": tuple(FREEZE),
    "clip": tuple(CLIP),
    "tier": tuple(TIERS),
    "accumulation": (1, 4),
    "tied": (False, True),
    "two_groups": (False, True),
    # `immediate` knows no clipping: it is compared to the bit elsewhere
    "schedule": ("synchronous", "deferred", "speculative", "auto"),
}


@dataclass(frozen=True)
class Case:
    """One run: its setup, on how many ranks, of which model."""

    world: int
    tied: bool
    setup: Setup
    name: str


def make_case(values: Mapping[str, Any]) -> Case:
    """A case from one value per factor."""
    tier, ratio = TIERS[values["tier"]]
    setup = Setup(
        stage=values["stage"],
        tier=tier,
        ratio=ratio,
        schedule=values["schedule"],
        accumulation=values["accumulation"],
        clip=CLIP[values["clip"]],
        freeze=FREEZE[values["freeze"]],
        two_groups=values["two_groups"],
    )
    words = [
        f"world{values['world']}",
        f"stage{values['stage']}",
        values["tier"],
        values["schedule"],
        f"accum{values['accumulation']}",
        f"clip_{values['clip']}",
        f"freeze_{values['freeze']}",
        "tied" if values["tied"] else "untied",
        "groups2" if values["two_groups"] else "groups1",
    ]
    return Case(values["world"], values["tied"], setup, "-".join(words))


def pairs_of(values: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
    """All pairs of (factor, value) in one choice."""
    return {(a, values[a], b, values[b]) for a, b in itertools.combinations(FACTORS, 2)}


def all_pairs() -> set[tuple[str, Any, str, Any]]:
    """Every pair of values of two different factors."""
    return {
        (a, x, b, y) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]
    }  # fmt: skip


def pairwise_choices() -> list[dict[str, Any]]:
    """Choices that together contain every pair: of 40 random ones that hold a missing pair the best, again and again.

    (A covering array by the greedy method; the seed makes it the same list everywhere.)
    """
    dice = random.Random(0)
    missing = all_pairs()
    chosen = []
    while missing:
        a, x, b, y = min(missing, key=repr)
        candidates = []
        for _ in range(40):
            values = {factor: dice.choice(list(allowed)) for factor, allowed in FACTORS.items()}
            candidates.append(values | {a: x, b: y})
        best = max(candidates, key=lambda values: len(pairs_of(values) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


PAIRWISE = [make_case(values) for values in pairwise_choices()]
