"""One launcher per machine, started by ssh (or one `srun` for all), watched here, and ended together.

A started launcher ends itself when its stdin ends (`watch_stdin`): closing the pipe is how it is stopped, and when this
process dies, be it by kill -9, the pipe closes too, through ssh as well. So nothing stays behind on any machine.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from heavylift.errors import EXIT_USER_ERROR, UserError
from heavylift.launch.node_errors import NodeStderr
from heavylift.launch.report import SHUTDOWN_S, first_cause, show_user_errors
from heavylift.launch.runner import ending_signals

STDIN_VARIABLE = "HEAVYLIFT_ENDS_WITH_STDIN"
"""1: this launcher was started by another one and ends when its stdin does."""
FORWARDED = ("NCCL", "PYTHON", "UCX", "GLOO", "TORCH", "HEAVYLIFT", "OMP_NUM_THREADS", "HF_", "CUDA_DEVICE_ORDER")
"""Variables whose names start so go to every machine."""
_OURS_ALONE = ("HEAVYLIFT_LAUNCHER_PID", "HEAVYLIFT_PLACES", "HEAVYLIFT_BIND", "HEAVYLIFT_FAILURES")
_SSH_FAILED = 255  # ssh(1), EXIT STATUS
# a script's own 255 (sys.exit(-1)), so that it is not taken for ssh's
_OTHER_255 = 213
_CHECK_S = 20
_POLL_S = 0.1
# a node whose ranks only lost their connection may be seen before the one where it began
_GRACE_S = 1.5


@dataclass(frozen=True)
class NodeCommand:
    """How the launcher of one machine is started."""

    name: str
    argv: tuple[str, ...]
    by_ssh: bool


class _Stopped(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def read_environment_file(environment: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """KEY=VALUE lines of `.deepspeed_env` (or the name in DS_ENV_FILE) in `folders`, later ones over earlier ones.

    Raises UserError with the file and number of a line of another form.
    """
    found: dict[str, str] = {}
    for folder in folders:
        path = folder / environment.get("DS_ENV_FILE", ".deepspeed_env")
        if not path.is_file():
            continue
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise UserError(f"{path}: cannot be read: {reason}; expected lines KEY=VALUE") from None
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, equals, value = line.strip().partition("=")
            if not equals or not name.isidentifier():
                raise UserError(f"{path}:{number}: expected KEY=VALUE, got {line.strip()[:80]!r}")
            found[name] = value
    return found


def forwarded_environment(environment: Mapping[str, str], from_file: Mapping[str, str]) -> dict[str, str]:
    """What every machine's launcher gets: our NCCL, PYTHON... variables, and the file's over them."""
    ours = {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED) and name not in _OURS_ALONE and name.replace("_", "a").isalnum()
    }
    return {**ours, **from_file}


def ssh_argv(host: str, port: int | None, extra: Sequence[str], remote: str) -> tuple[str, ...]:
    """ssh to `host` that never asks for a password."""
    at = ("-p", str(port)) if port is not None else ()
    return ("ssh", *at, "-o", "BatchMode=yes", *extra, host, remote)


def remote_line(folder: str, variables: Mapping[str, str], venv_script: str | None, command: Sequence[str]) -> str:
    """The shell line for a machine: same folder, these variables, then the command in the shell's place."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    sourced = [f". {shlex.quote(venv_script)}"] if venv_script is not None else []
    return " && ".join([f"cd {shlex.quote(folder)}", *exports, *sourced, f"exec {shlex.join(command)}"])


def check_ssh(hosts: Sequence[str], port: int | None, extra: Sequence[str]) -> None:
    """Tries ssh to every host at once. Raises UserError with every host that it fails for."""

    def attempt(host: str) -> str | None:
        argv = ssh_argv(host, port, ("-o", "ConnectTimeout=10", *extra), "true")
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CHECK_S)
        except FileNotFoundError:
            return "there is no ssh on this machine"
        except subprocess.TimeoutExpired:
            return f"no answer within {_CHECK_S} s"
        if done.returncode == 0:
            return None
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return said[-1].strip() if said else f"exit code {done.returncode}"

    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = list(pool.map(attempt, hosts))
    problems = [
        f"host {host}: ssh failed: {answer}; 'ssh {host} true' must work without a password"
        for host, answer in zip(hosts, answers, strict=True)
        if answer is not None
    ]
    if problems:
        raise UserError(*problems)


def address_of(host: str, port: int | None, extra: Sequence[str]) -> str:
    """The first address that a host reports of itself by `hostname -I`. Raises UserError when it does not."""
    done = subprocess.run(ssh_argv(host, port, extra, "hostname -I"), stdin=subprocess.DEVNULL, capture_output=True)
    addresses = done.stdout.decode(errors="replace").split()
    if done.returncode != 0 or not addresses:
        raise UserError(f"host {host}: 'hostname -I' told no address; give --master_addr")
    return addresses[0]


def told_exit_code(code: int) -> int:
    """What a launcher that another one started ends with, for the exit code `code` of its ranks."""
    return _OTHER_255 if code == _SSH_FAILED else code


def run_nodes(nodes: Sequence[NodeCommand]) -> int:
    """Starts all, waits for all; when one fails, or a signal comes, ends the others. Returns the run's exit code.

    That is 0, the code of the node that failed first, or 128 + n for signal n.
    """
    started: list[subprocess.Popen[bytes]] = []
    with _signals_raise(), ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="heavylift-nodes-"))
        stderr = NodeStderr(folder, len(nodes))
        stack.callback(lambda: show_user_errors(stderr.told))
        stack.enter_context(stderr)
        try:
            for index, node in enumerate(nodes):
                with stderr.writing_end(index) as end:
                    # a session of its own: a Ctrl-C of the terminal comes to us alone, and we end it in order
                    process = subprocess.Popen(node.argv, stdin=subprocess.PIPE, stderr=end, start_new_session=True)
                    started.append(process)
            codes = _wait(started)
        except FileNotFoundError as error:
            raise UserError(f"{error.filename}: not found on this machine; it starts the ranks of the others") from None
        except _Stopped as stopped:
            _end(started)
            name = signal.Signals(stopped.number).name
            print(f"ended by {name}; the workers of all hosts are stopped", file=sys.stderr)
            return 128 + stopped.number
        finally:
            _end(started)
    return _report(nodes, codes, stderr.nodes)


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> dict[int, tuple[int, float]]:
    """Index -> (exit code, when) of the nodes that ended, all of them or the failed ones and who followed soon."""
    ended: dict[int, tuple[int, float]] = {}
    failed_at = None
    while len(ended) < len(started):
        for index, process in enumerate(started):
            if index not in ended and (code := process.poll()) is not None:
                ended[index] = (code, time.monotonic())
                if code != 0 and failed_at is None:
                    failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + _GRACE_S:
            break
        time.sleep(_POLL_S)
    return ended


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs: by its stdin, then by signals. Signals to us are ignored from here on: the end is near."""
    for number in ending_signals():
        signal.signal(number, signal.SIG_IGN)
    for process in started:
        if process.stdin is not None and not process.stdin.closed:
            process.stdin.close()
    end = time.monotonic() + SHUTDOWN_S + 5
    for ask in (signal.SIGTERM, signal.SIGKILL):
        for process in started:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(ask)
        end = time.monotonic() + SHUTDOWN_S
    for process in started:
        process.wait()


def _report(nodes: Sequence[NodeCommand], ended: dict[int, tuple[int, float]], told: Collection[int]) -> int:
    """Names the node where it began; what happened there its own launcher has said.

    `told`: nodes that had a user error of their ranks, which names the rank.
    """
    # a shell's 128 + n as the negative signal that `first_cause` knows
    signals = {128 + int(number) for number in signal.Signals}
    exits = [
        (index, 128 - code if code in signals else code, seconds) for index, (code, seconds) in ended.items() if code
    ]
    if not exits:
        return 0
    index, code = first_cause(sorted(exits, key=lambda one: one[2]))
    name = nodes[index].name
    if nodes[index].by_ssh and code == _SSH_FAILED:
        raise UserError(f"host {name}: ssh failed or lost its connection; the other hosts' ranks are ended")
    if len(nodes) > 1 and not (code == EXIT_USER_ERROR and index in told):
        print(f"error: host {name} failed; the other hosts' ranks are ended", file=sys.stderr)
    if code == _OTHER_255:
        return 255
    return 128 - code if code < 0 else code


@contextmanager
def _signals_raise() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    old = {number: signal.signal(number, stop) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def watch_stdin() -> bool:
    """In a launcher started by another one: SIGTERM to this process when its stdin ends. Workers get an empty stdin.

    Returns whether this is such a launcher.
    """
    if os.environ.pop(STDIN_VARIABLE, "0") != "1":
        return False
    pipe = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def watch() -> None:
        try:
            while os.read(pipe, 4096):
                pass
        except OSError:
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()
    return True
