"""Float32 weights out of a checkpoint; also `python -m deepspeed.utils.zero_to_fp32`."""

from heavylift.api.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

if __name__ == "__main__":
    import sys

    from heavylift.api.zero_to_fp32 import main

    sys.exit(main())
