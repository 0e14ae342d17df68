"""The launcher's command line, spelled as DeepSpeed spells it; `-` does for `_` in a long flag.

Flags come before the script; what follows the script is the script's. Left out, with a word of what to use: elastic
training, autotuning, the MPI launchers.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from heavylift.errors import UserError

DEFAULT_HOSTFILE = Path("/job/hostfile")
DEFAULT_PORT = 29500
_LAUNCHERS = ("ssh", "pdsh", "slurm")
_REFUSED = {
    "--elastic_training": "elastic training is not there; start again from the checkpoint with another --num_nodes",
    "--min_elastic_nodes": "elastic training is not there; give --num_nodes",
    "--max_elastic_nodes": "elastic training is not there; give --num_nodes",
    "--autotuning": "there is no autotuning; leave it out, and set batch size and offload ratio yourself",
}
# DeepSpeed's own defaults, which scripts that pass every flag on write out
_NOT_GIVEN = {"num_nodes": -1, "num_gpus": -1, "node_rank": -1, "include": "", "exclude": "", "master_addr": ""}
_MPI = {"openmpi", "mvapich", "mpich", "impi", "mosaicml"}
_UNRECOGNIZED = "unrecognized arguments: "
_MOST = 99_999
"""Machines, or slots of one: a mistyped number is told before anything of that length is made."""
_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class LaunchOptions:
    """What the user asked for; flags not given are None or False."""

    script: str
    script_args: tuple[str, ...]
    hostfile: Path | None
    include: str | None
    exclude: str | None
    num_nodes: int | None
    num_gpus: int | None
    master_addr: str | None
    master_port: int | None
    node_rank: int | None
    launcher: str
    """`ssh` or `slurm`."""
    launcher_args: tuple[str, ...]
    module: bool
    no_python: bool
    no_local_rank: bool
    no_ssh: bool
    no_ssh_check: bool
    force_multi: bool
    save_pid: bool
    rank_log_dir: Path | None
    bind_cores: bool
    core_list: str | None
    ssh_port: int | None
    venv_script: str | None
    log_level: str
    as_deepspeed: bool
    resctrl: str | None
    world_info: str | None
    """From our own launcher on another machine: hosts and slots."""
    as_if_not_given: tuple[str, ...] = ()
    """Flags with a number that DeepSpeed takes for its default, as `--num_gpus -1`."""

    @property
    def says_notes(self) -> bool:
        """Whether more than warnings is said."""
        return self.log_level in ("debug", "info")


def parse_options(arguments: Sequence[str]) -> LaunchOptions:
    """Raises UserError for anything that cannot be; `--help` prints and leaves (SystemExit 0)."""
    for argument in arguments:
        if not argument.startswith("-"):
            break
        name = argument.split("=")[0].replace("-", "_").replace("__", "--", 1)
        if name in _REFUSED:
            raise UserError(f"{name}: {_REFUSED[name]}")
    given = _parser().parse_args(list(arguments))
    unset = [name for name, not_given in _NOT_GIVEN.items() if getattr(given, name) == not_given]
    for name in unset:
        setattr(given, name, None)
    _check(given)
    launcher = "ssh" if given.launcher == "pdsh" else given.launcher
    return LaunchOptions(
        script=given.script,
        script_args=tuple(given.script_args),
        hostfile=given.hostfile,
        include=given.include,
        exclude=given.exclude,
        num_nodes=given.num_nodes,
        num_gpus=given.num_gpus,
        master_addr=given.master_addr,
        master_port=given.master_port,
        node_rank=given.node_rank,
        launcher=launcher,
        launcher_args=_split_words("--launcher_args", given.launcher_args),
        module=given.module,
        no_python=given.no_python,
        no_local_rank=given.no_local_rank,
        no_ssh=given.no_ssh,
        no_ssh_check=given.no_ssh_check,
        force_multi=given.force_multi,
        save_pid=given.save_pid,
        rank_log_dir=given.enable_each_rank_log,
        bind_cores=given.bind_cores_to_rank or given.bind_core_list is not None,
        core_list=given.bind_core_list,
        ssh_port=given.ssh_port,
        venv_script=given.venv_script,
        log_level="error" if given.quiet else given.log_level,
        as_deepspeed=given.as_deepspeed,
        resctrl=given.resctrl,
        world_info=given.world_info,
        as_if_not_given=tuple(f"--{name} -1" for name in unset if _NOT_GIVEN[name] == -1),
    )


def _check(given: argparse.Namespace) -> None:
    """What the flags must fulfil together."""
    problems = []
    if not given.script:
        problems.append("heavylift launch: the script's name is empty")
    if given.launcher in _MPI:
        problems.append(
            f"--launcher {given.launcher}: MPI is not called from here; use ssh, slurm, or mpirun heavylift launch"
        )
    elif given.launcher not in _LAUNCHERS:
        problems.append(f"--launcher {given.launcher}: expected one of {', '.join(_LAUNCHERS)}")
    if given.module and given.no_python:
        problems.append("--module and --no_python cannot be used together: a module needs Python")
    if given.as_deepspeed and given.no_python:
        problems.append("--as-deepspeed and --no_python cannot be used together: it prepares the Python of each rank")
    if given.log_level not in _LEVELS:
        problems.append(f"--log_level {given.log_level}: expected one of {', '.join(_LEVELS)}")
    for name in ("num_nodes", "num_gpus"):
        value = getattr(given, name)
        if value is not None and value < 1:
            problems.append(f"--{name} {value}: expected at least 1")
        elif value is not None and value > _MOST:
            problems.append(f"--{name} {value}: expected at most {_MOST}")
    for name in ("master_port", "ssh_port"):
        value = getattr(given, name)
        if value is not None and not 1 <= value <= 65535:
            problems.append(f"--{name} {value}: expected a port from 1 to 65535")
    if given.node_rank is not None and given.node_rank < 0:
        problems.append(f"--node_rank {given.node_rank}: expected 0 or more")
    if given.enable_each_rank_log is not None and given.enable_each_rank_log.is_file():
        problems.append(f"--enable_each_rank_log {given.enable_each_rank_log}: expected a folder, this is a file")
    if problems:
        raise UserError(*problems)


def _split_words(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"{flag} {text!r}: {error}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would print its usage of thirty lines and leave
        if message.startswith("the following arguments are required"):
            message = "no script is given: heavylift launch [flags] script.py"
        elif message.startswith(_UNRECOGNIZED):
            message += "".join(self._meant(flag) for flag in message.removeprefix(_UNRECOGNIZED).split())
        raise UserError(f"heavylift launch: {message}; see heavylift launch --help")

    def _meant(self, flag: str) -> str:
        known = [name for name in self._option_string_actions if name != "--world_info"]
        near = get_close_matches(flag.split("=")[0], known, n=1)
        return f" (did you mean {near[0]}?)" if flag.startswith("-") and near else ""

    def add_flag(self, name: str, *more: str, **options: Any) -> None:
        """A flag under its name and with `-` for `_`."""
        spelled = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        self.add_argument(*more, *spelled, **options)


def _parser() -> _Parser:
    parser = _Parser(
        prog="heavylift launch",
        description="Start a script on every GPU of this machine, or of several.",
        allow_abbrev=False,
        usage="heavylift launch [flags] script.py [arguments of the script]",
    )
    _add_machines(parser)
    _add_nodes(parser)
    _add_ranks(parser)
    parser.add_argument("script", help="script to start (with --module a module, with --no_python a program)")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def _add_machines(parser: _Parser) -> None:
    add = parser.add_flag
    add("hostfile", "-H", type=Path, help=f"lines 'host slots=n'; {DEFAULT_HOSTFILE} is used where it exists")
    add("include", "-i", help="only these: host:0,2@host2 (localhost:0,2 without a hostfile)")
    add("exclude", "-e", help="all but these, in the same form")
    add("num_nodes", type=int, help="only the first so many hosts")
    parser.add_argument(
        "--num_gpus",
        "--num-gpus",
        "--num_accelerators",
        "--num-accelerators",
        dest="num_gpus",
        type=int,
        help="ranks per host; without GPUs so many processes on the CPU",
    )
    add("master_addr", help="address of the first host, as the others reach it")
    add("master_port", type=int, help=f"its port; default: {DEFAULT_PORT}, any free one on a single machine")


def _add_nodes(parser: _Parser) -> None:
    add = parser.add_flag
    add("launcher", default="ssh", help="ssh (pdsh means the same here) or slurm")
    add("launcher_args", default="", help="further arguments for ssh or srun, in one word")
    add("node_rank", type=int, help="with --no_ssh: which host this is, counted from 0")
    add("no_ssh", action="store_true", help="start this host's ranks only; every host is started by hand")
    add("no_ssh_check", action="store_true", help="do not try ssh to every host first")
    add("ssh_port", type=int, help="port of the hosts' ssh servers")
    add("force_multi", action="store_true", help="use ssh even for a single host")
    add("venv_script", help="sourced on every host that ssh or srun starts a launcher on, before it")
    parser.add_argument("--world_info", help=argparse.SUPPRESS)


def _add_ranks(parser: _Parser) -> None:
    add = parser.add_flag
    add("module", action="store_true", help="the script is a module, as in python -m")
    add("no_python", action="store_true", help="the script is a program, run as it is")
    add("no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    add("save_pid", action="store_true", help="write the launcher's process id to TMP/PID.deepspeed while it runs")
    add("enable_each_rank_log", type=Path, metavar="DIR", help="stdout and stderr of each rank to a file in DIR")
    add("bind_cores_to_rank", action="store_true", help="each rank on the cores beside its GPU, with their memory")
    add("bind_core_list", metavar="0-15,32", help="bind, to these cores only")
    add("resctrl", metavar="step=70,rest=30", help="parts of L3 cache and memory bandwidth (resctrl, needs root)")
    add("as_deepspeed", action="store_true", help="the script's 'import deepspeed' finds heavylift")
    add("log_level", default="info", help="debug, info, warning, error or critical")
    parser.add_argument("-q", "--quiet", action="store_true", help="as --log_level error")
