"""A plain `import deepspeed` resolves to heavylift, so that scripts written for DeepSpeed run as they are.

    python -m heavylift.compat script.py --deepspeed ds_config.json
    torchrun --nproc-per-node 4 -m heavylift.compat script.py ...    # mpirun, srun: python -m heavylift.compat
    heavylift launch --as-deepspeed --num_gpus 4 script.py ...       # or with HEAVYLIFT_AS_DEEPSPEED=1
    import heavylift.compat; heavylift.compat.install()              # before the first import of deepspeed

Names and modules are those of `heavylift/compat/deepspeed/`; what is not there raises ImportError and says what is.
`importlib.metadata` knows a `deepspeed` too, which is how transformers and accelerate find out that it is there.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from heavylift.errors import UserError

DEEPSPEED_VERSION = "0.19.6+heavylift"
"""The release whose surface is provided."""

logger = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent / "deepspeed"


def install() -> None:
    """Makes `import deepspeed` resolve here, in this process, from now on. A second call does nothing.

    Raises UserError when another deepspeed has been imported already.
    """
    from heavylift.api import script_errors
    from heavylift.compat.finder import DeepSpeedFinder

    script_errors.install()
    if any(isinstance(finder, DeepSpeedFinder) for finder in sys.meta_path):
        return
    imported = sys.modules.get("deepspeed")
    if imported is not None:
        raise UserError(
            f"heavylift.compat.install: another deepspeed ({imported.__file__}) has been imported already; call "
            "install() before the first import of deepspeed, transformers or accelerate"
        )
    late = [name for name in ("accelerate.accelerator", "transformers.integrations.deepspeed") if name in sys.modules]
    if late:
        logger.warning(
            "heavylift.compat.install: %s was imported before and takes DeepSpeed for missing; call install() first",
            " and ".join(name.partition(".")[0] for name in late),
        )
    sys.meta_path.insert(0, DeepSpeedFinder(_FOLDER, DEEPSPEED_VERSION))
