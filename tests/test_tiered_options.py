"""TieredOptions: what cannot be is refused, what has no effect is told, plain strings are what they name."""

from __future__ import annotations

from typing import Any

import pytest

from heavylift.config.schema import Schedule, StateFormat, Tier
from heavylift.offload.options import TieredOptions


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ratio": 5.0}, "ratio: expected a number from 0 to 1, got 5.0"),
        ({"ratio": -1.0}, "ratio: expected a number from 0 to 1, got -1.0"),
        ({"streamed_share": 7.0}, "streamed_share: expected a number from 0 to 1, got 7.0"),
        ({"gradients_on": "gpu"}, "'gpu' is not a valid Tier"),
        ({"state_format": "fp8"}, "'fp8' is not a valid StateFormat"),
        ({"schedule": "immediate", "max_grad_norm": 1.0}, "schedule immediate knows no clipping"),
        ({"schedule": "speculative", "state_format": "int8"}, "cannot be taken back"),
        (
            {"state_format": "int8", "streamed_share": 0.5},
            "states in format int8 are not streamed: expected 0, got 0.5",
        ),
    ],
)
def test_what_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TieredOptions(**options)


def test_strings_are_what_they_name() -> None:
    options = TieredOptions("host", schedule="synchronous", state_format="split", gradients_on="device")  # type: ignore[arg-type]
    assert options == TieredOptions(
        Tier.HOST, 1.0, Schedule.SYNCHRONOUS, state_format=StateFormat.SPLIT, gradients_on=Tier.DEVICE
    )
    assert options.schedule is Schedule.SYNCHRONOUS and not options.overlapped


def test_what_has_no_effect_is_told() -> None:
    def told(**options: Any) -> list[str]:
        return TieredOptions(**{"tier": Tier.HOST, "schedule": Schedule.AUTO, **options}).without_effect

    assert told() == told(gradients_on="device") == told(streamed_share=0.5) == []
    assert told(gradients_on="device", schedule="synchronous") == [
        "gradients_on: without effect, as no step is overlapped"
    ]
    assert told(gradients_on="device", accumulate=True) == [
        "gradients_on: without effect, as gradients are added up on the host"
    ]
    assert told(ratio=0.0, streamed_share=0.5) == ["streamed_share: without effect, as ratio is 0"]
