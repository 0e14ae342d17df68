"""One rank of a pool: `python -m ranks.worker`, started by `ranks.pool`."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Joins the group, then answers jobs until the pool goes away."""
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # a crash tells where every thread was
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['RANK_STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(minutes=4),
    )
    pipe = Connection(int(os.environ["RANK_PIPE"]))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        reply: tuple[bool, Any]
        try:
            job, args = pickle.loads(request)
            reply = (True, job(*args))
        except BaseException:
            reply = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(reply))
        del reply
        gc.collect()


if __name__ == "__main__":
    main()
