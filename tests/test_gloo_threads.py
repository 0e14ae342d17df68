"""Before the interpreter ends, gloo's threads are waited for: exit code 134 after a good run otherwise."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import command_env

from heavylift.gloo_threads import GLOO_THREAD, wait_until_idle
from heavylift.offload.thread_names import name_thread

LINUX = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")


@LINUX
def test_a_thread_at_work_is_waited_for_and_one_that_sleeps_is_not() -> None:
    started, end, done = threading.Event(), threading.Event(), threading.Event()
    data = bytes(2**20)

    def work() -> None:
        name_thread(threading.get_native_id(), GLOO_THREAD[:15])
        started.set()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            hashlib.sha256(data * 64).digest()  # without the lock, as gloo works
        done.set()
        end.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(10)
    assert not wait_until_idle(0) or done.is_set()
    assert wait_until_idle(30)
    assert done.is_set()
    end.set()
    thread.join()


SCRIPT = """
import atexit
atexit.register(lambda: print("last"))
import heavylift
from heavylift import gloo_threads
real = gloo_threads._any_at_work
def asked():
    print("asked")
    return real()
gloo_threads._any_at_work = asked
heavylift.init_distributed()
"""


def test_a_program_waits_when_it_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=command_env(), timeout=120, check=True
    )
    said = done.stdout.split()
    assert said[0] == "asked" and said[-1] == "last"
