"""One rank of a run: `python -m heavylift.train.worker RESOLVED_RECIPE.yaml`, started by the launcher or torchrun.

A second argument is the request of `heavylift bench` (`heavylift.train.bench_request`): the run is then measured too.

A user error is printed once, by rank 0, and every rank exits with 2; one that only another rank met is printed there.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from heavylift.config.recipe import load_recipe
from heavylift.errors import EXIT_USER_ERROR, UserError
from heavylift.launch.failures import RANK_0_SPEAKS_FIRST_S


def main(argv: Sequence[str]) -> None:
    """Trains as the recipe at `argv[0]` says; with a bench request at `argv[1]` writes its result."""
    _quiet_libraries()
    # after the quick part: these import torch and transformers
    import torch.distributed as dist

    from heavylift.models.compiled import why_not_compilable
    from heavylift.train.bench import write_result
    from heavylift.train.bench_request import BenchRequest
    from heavylift.train.loop import train
    from heavylift.train.setup import set_up

    try:
        request = BenchRequest.read(argv[1]) if len(argv) > 1 else None
        run = set_up(load_recipe(argv[0]))
        if request is not None:
            request.check(run.data.num_steps)
        # until here a Ctrl-C ends this process at once; curves want to be closed
        signal.signal(signal.SIGINT, signal.default_int_handler)
        history = train(run)
        if request is not None:
            write_result(run, history, request)
        run.engine.optimizer.close()
    except Exception as error:
        # some families' layers are no single graph, and a machine may have no compiler
        why = why_not_compilable(error)
        if why is None:
            raise
        raise UserError(f"train.compile: the model's layers cannot be compiled here: {why}; set it to false") from error
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _quiet_libraries() -> None:
    """One voice on the screen: rank 0's. Libraries speak only of errors, other ranks of nothing less."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.basicConfig(
        level=logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.ERROR,
        format="%(levelname)s: %(message)s",
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        if not isinstance(error, UserError):
            # most often it is another rank that failed, and this one has only lost its connection: the launcher ends
            # it meanwhile, and what is shown is the cause
            time.sleep(RANK_0_SPEAKS_FIRST_S)
            raise
        if os.environ.get("RANK", "0") != "0":
            time.sleep(RANK_0_SPEAKS_FIRST_S)  # the launcher ends this rank as soon as rank 0 has spoken
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USER_ERROR)
