"""`heavylift launch` from its options to an exit code: this machine's ranks, or a launcher on each of several."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from heavylift.errors import UserError
from heavylift.launch.addresses import check_port_is_free, is_this_machine, own_address_towards, resolves
from heavylift.launch.binding import binding_environment, machine_places, num_memory_nodes
from heavylift.launch.cores import gpu_count
from heavylift.launch.devices import VISIBLE_VARIABLE, device_list, gpu_pci_ids
from heavylift.launch.entry import AS_DEEPSPEED_VARIABLE, LOCAL_RANK_FLAG
from heavylift.launch.hostfile import Slots, choose, read_hostfile
from heavylift.launch.multinode import (
    STDIN_VARIABLE,
    NodeCommand,
    address_of,
    check_ssh,
    forwarded_environment,
    read_environment_file,
    remote_line,
    run_nodes,
    ssh_argv,
    told_exit_code,
    watch_stdin,
)
from heavylift.launch.options import DEFAULT_HOSTFILE, DEFAULT_PORT, LaunchOptions
from heavylift.launch.pid_file import saved_pid
from heavylift.launch.placement import RankPlace, place_ranks
from heavylift.launch.quota import num_usable_cores
from heavylift.launch.rank_output import LOG_VARIABLE
from heavylift.launch.resctrl import partitions, partitions_from_environment
from heavylift.launch.runner import NodeRun, run_node
from heavylift.launch.slurm import job_nodes, srun_command
from heavylift.launch.surroundings import Node, Rank, surroundings
from heavylift.launch.topology import format_cpu_list, read_topology


@dataclass(frozen=True)
class NodePlace:
    """This machine among the machines of a run."""

    host: str
    slots: list[int]
    node_rank: int = 0
    num_nodes: int = 1
    world: Slots | None = None
    """Slots of every host, None where only this machine's are known."""
    master_addr: str | None = None
    master_port: int | None = None

    @property
    def world_size(self) -> int | None:
        """Ranks of all machines, None if not known."""
        if self.num_nodes == 1:
            return len(self.slots)
        return None if self.world is None else sum(len(slots) for slots in self.world.values())


def start(options: LaunchOptions) -> int:
    """Runs the script everywhere it is to run and waits. Returns the exit code. Raises UserError."""
    if watch_stdin():
        return told_exit_code(_start(options, ours=True))
    return _start(options, ours=False)


def _start(options: LaunchOptions, ours: bool) -> int:
    """`ours`: whether another launcher started this one."""
    _check_script(options)
    if options.as_if_not_given:
        _note(options, f"{', '.join(options.as_if_not_given)}: as DeepSpeed does, taken as not given")
    if options.world_info is not None:
        return start_node(options, _from_world(options, options.world_info), is_part=ours)
    around = surroundings()
    if isinstance(around, Rank):
        _become_rank(options, around)
    if options.no_ssh or options.node_rank is not None:
        return start_node(options, _by_hand(options), is_part=ours)
    if isinstance(around, Node):
        # every node runs this line: to start the others from here would start them many times over
        _note(options, f"started by {around.who} as node {around.node_rank} of {around.num_nodes}; no hostfile is read")
        return start_node(options, _of_surroundings(options, around), is_part=ours)
    if options.launcher == "slurm":
        return _start_by_srun(options)
    hostfile = options.hostfile or (DEFAULT_HOSTFILE if DEFAULT_HOSTFILE.exists() else None)
    if hostfile is None:
        return start_node(options, _alone(options), is_part=ours)
    chosen = choose(read_hostfile(hostfile), options.include, options.exclude, options.num_nodes, options.num_gpus)
    host = next(iter(chosen))
    if len(chosen) == 1 and is_this_machine(host) and not options.force_multi:
        place = NodePlace(host, chosen[host], master_addr=options.master_addr, master_port=options.master_port)
        return start_node(options, place, is_part=ours)
    return _start_by_ssh(options, chosen)


def start_node(options: LaunchOptions, place: NodePlace, is_part: bool = False) -> int:
    """Starts this machine's ranks and waits. `is_part`: another launcher has started this one. Raises UserError."""
    if options.venv_script is not None:
        raise UserError(
            f"--venv_script {options.venv_script}: sourced before a launcher that ssh or srun starts, and this run "
            "starts none; leave it out, and source it before this command"
        )
    gpus = gpu_count()
    _check_slots(place, gpus)
    num_ranks = len(place.slots)
    if gpus == 0 and place.node_rank == 0:
        more = "" if options.num_gpus or place.num_nodes > 1 or num_ranks > 1 else " (--num_gpus N starts N)"
        _note(options, f"no GPU is visible: {num_ranks} process{'es' * (num_ranks > 1)} on the CPU{more}")
    if place.node_rank == 0 and place.master_port is not None:
        check_port_is_free(place.master_port)
    places = machine_places(num_ranks, place.slots, options.core_list, gpu_pci_ids() if gpus else [])
    if options.core_list is not None and len({cpu for one in places for cpu in one.cpus}) < num_ranks:
        raise UserError(f"--bind_core_list {options.core_list}: fewer cores than the {num_ranks} ranks of this machine")
    if options.bind_cores:
        _note_places(options, places)
    environment = {
        **binding_environment(places, options.bind_cores),
        "LOCAL_SIZE": str(num_ranks),
        "CROSS_RANK": str(place.node_rank),
        "CROSS_SIZE": str(place.num_nodes),
        **({VISIBLE_VARIABLE: device_list(place.slots, gpus)} if gpus else {}),
        **({AS_DEEPSPEED_VARIABLE: "1"} if options.as_deepspeed else {}),
        **_rank_logs(options, speaks=place.node_rank == 0),
    }
    run = NodeRun(
        num_ranks,
        _entry_arguments(options),
        place.node_rank,
        place.num_nodes,
        place.world_size,
        place.master_addr,
        place.master_port,
        environment,
        is_part=is_part,
    )
    with ExitStack() as stack:
        stack.enter_context(saved_pid(options.save_pid))
        stack.enter_context(partitions(options.resctrl) if options.resctrl else partitions_from_environment())
        return run_node(run)


def _alone(options: LaunchOptions) -> NodePlace:
    """This machine without a hostfile."""
    if options.num_nodes is not None and options.num_nodes > 1:
        raise UserError(
            f"--num_nodes {options.num_nodes}: there is no hostfile that names them; give --hostfile, or start each "
            "node by hand with --no_ssh --node_rank K --master_addr A, or use --launcher slurm in a SLURM job"
        )
    place = NodePlace("localhost", _local_slots(options), master_port=options.master_port)
    return replace(place, master_addr=options.master_addr)


def _local_slots(options: LaunchOptions) -> list[int]:
    """The slots of this machine that the flags leave."""
    gpus = gpu_count()
    filtered = options.include is not None or options.exclude is not None
    if gpus:
        slots = gpus
        if not filtered and (options.num_gpus or 0) > gpus:
            visible = os.environ.get(VISIBLE_VARIABLE)
            why = f" ({VISIBLE_VARIABLE}={visible})" if visible is not None else ""
            raise UserError(f"--num_gpus {options.num_gpus}: this machine has {gpus} visible GPUs{why}")
    else:
        # a slot is a process then; a filter needs an end to count from
        slots = num_usable_cores() if filtered else options.num_gpus or 1
    return choose({"localhost": slots}, options.include, options.exclude, None, options.num_gpus)["localhost"]


def _by_hand(options: LaunchOptions) -> NodePlace:
    """One of several machines, each started by hand."""
    if options.node_rank is None:
        raise UserError("--no_ssh: give --node_rank K, which of the nodes this is, counted from 0")
    world = None
    if options.hostfile is not None or DEFAULT_HOSTFILE.exists():
        hosts = read_hostfile(options.hostfile or DEFAULT_HOSTFILE)
        world = choose(hosts, options.include, options.exclude, options.num_nodes, options.num_gpus)
    num_nodes = len(world) if world is not None else options.num_nodes or 1
    if options.node_rank >= num_nodes:
        raise UserError(
            f"--node_rank {options.node_rank}: there are {num_nodes} nodes, counted from 0; see --num_nodes"
        )
    host = list(world)[options.node_rank] if world is not None else "localhost"
    slots = world[host] if world is not None else _local_slots(options)
    addr = options.master_addr or (next(iter(world)) if world is not None else None)
    if num_nodes == 1:
        return NodePlace(host, slots, master_addr=options.master_addr, master_port=options.master_port)
    if addr is None:
        raise UserError("--no_ssh: give --master_addr, the address of node 0 as the others reach it")
    return NodePlace(host, slots, options.node_rank, num_nodes, world, addr, options.master_port or DEFAULT_PORT)


def _of_surroundings(options: LaunchOptions, node: Node) -> NodePlace:
    if options.num_nodes not in (None, node.num_nodes):
        raise UserError(f"--num_nodes {options.num_nodes}: {node.who} has started {node.num_nodes} nodes; leave it out")
    addr = options.master_addr or node.master_addr
    port = options.master_port or node.master_port
    return NodePlace("localhost", _local_slots(options), node.node_rank, node.num_nodes, None, addr, port)


def _from_world(options: LaunchOptions, text: str) -> NodePlace:
    """As the launcher that started us says."""
    try:
        world: Slots = json.loads(base64.urlsafe_b64decode(text))
        host = list(world)[options.node_rank or 0]
    except (ValueError, IndexError, TypeError):
        raise UserError("--world_info: this flag is for the launcher's own use; give --hostfile") from None
    port = options.master_port or DEFAULT_PORT
    return NodePlace(host, world[host], options.node_rank or 0, len(world), world, options.master_addr, port)


def _start_by_ssh(options: LaunchOptions, chosen: Slots) -> int:
    """A launcher on each of the chosen hosts; on this machine without ssh, unless `--force_multi` wants it."""
    hosts = list(chosen)
    here = [host for host in hosts if is_this_machine(host) and not options.force_multi]
    remote = [host for host in hosts if host not in here]
    if remote and not options.no_ssh_check:
        check_ssh(remote, options.ssh_port, options.launcher_args)
    addr = options.master_addr or _master_address(options, hosts, here)
    port = options.master_port or DEFAULT_PORT
    if is_this_machine(addr):
        check_port_is_free(port)
    from_file = read_environment_file(os.environ, [Path.home(), Path.cwd()])
    variables = {**forwarded_environment(os.environ, from_file), STDIN_VARIABLE: "1"}
    world = base64.urlsafe_b64encode(json.dumps(chosen).encode()).decode()
    commands = []
    for rank, host in enumerate(hosts):
        flags = ["--world_info", world, "--node_rank", str(rank), "--master_addr", addr, "--master_port", str(port)]
        line = remote_line(os.getcwd(), variables, options.venv_script, _launch_command(options, flags))
        argv: tuple[str, ...] = ("/bin/sh", "-c", line)
        if host in remote:
            argv = ssh_argv(host, options.ssh_port, options.launcher_args, line)
        commands.append(NodeCommand(host, argv, host in remote))
    if options.log_level == "debug":
        for command in commands:
            _note(options, f"{command.name}: {' '.join(command.argv)}")
    with saved_pid(options.save_pid):
        return run_nodes(commands)


def _master_address(options: LaunchOptions, hosts: list[str], here: list[str]) -> str:
    first = hosts[0]
    if first in here:
        others = [host for host in hosts if host not in here]
        return own_address_towards(others[0]) if others else "127.0.0.1"
    if resolves(first):
        return first
    # a name that only ssh's own configuration knows
    return address_of(first, options.ssh_port, options.launcher_args)


def _start_by_srun(options: LaunchOptions) -> int:
    """One `srun` that starts a launcher on every node of the job; each finds its place in SLURM's variables."""
    nodes = job_nodes(os.environ)
    filters = [text for text in (options.include, options.exclude) if text is not None]
    if options.hostfile is not None or any(":" in text for text in filters):
        raise UserError("--launcher slurm: nodes and GPUs are those of the job; leave out --hostfile and slots")
    chosen = list(choose(dict.fromkeys(nodes, 1), options.include, options.exclude, options.num_nodes))
    flags = ["--master_addr", options.master_addr] if options.master_addr is not None else []
    flags += ["--master_port", str(options.master_port)] if options.master_port is not None else []
    flags += ["--num_gpus", str(options.num_gpus)] if options.num_gpus is not None else []
    command = _launch_command(options, flags)
    if options.venv_script is not None:
        command = ["/bin/sh", "-c", remote_line(os.getcwd(), {}, options.venv_script, command)]
    os.environ[STDIN_VARIABLE] = "1"  # srun hands on its stdin and its environment
    argv = srun_command(chosen, options.launcher_args, command)
    with saved_pid(options.save_pid):
        return run_nodes([NodeCommand("srun", tuple(argv), by_ssh=False)])


def _launch_command(options: LaunchOptions, flags: list[str]) -> list[str]:
    """The command line of a launcher that another one starts."""
    switches = {
        "--module": options.module,
        "--no_python": options.no_python,
        "--no_local_rank": options.no_local_rank,
        "--bind_cores_to_rank": options.bind_cores,
        "--as-deepspeed": options.as_deepspeed,
    }
    values = {
        "--bind_core_list": options.core_list,
        "--resctrl": options.resctrl,
        "--enable_each_rank_log": options.rank_log_dir,
        "--log_level": options.log_level,
    }
    given = [flag for flag, wanted in switches.items() if wanted]
    for flag, value in values.items():
        given += [flag, str(value)] if value is not None else []
    # the activated environment's Python, where there is one to activate
    python = "python" if options.venv_script is not None else sys.executable
    start = [python, "-P", "-u", "-m", "heavylift", "launch"]
    return [*start, *flags, *given, options.script, *options.script_args]


def _entry_arguments(options: LaunchOptions) -> tuple[str, ...]:
    kind = "module" if options.module else "program" if options.no_python else "script"
    flag = () if options.no_local_rank else (LOCAL_RANK_FLAG,)
    return (*flag, kind, options.script, *options.script_args)


def _become_rank(options: LaunchOptions, rank: Rank) -> NoReturn:
    """This process is one rank already: the script takes its place."""
    local_rank, num_gpus = int(rank.variables["LOCAL_RANK"]), len(gpu_pci_ids())
    if 0 < num_gpus <= local_rank:
        seen = f"{num_gpus} GPU{'s' * (num_gpus > 1)}"
        raise UserError(
            f"{rank.who}: local rank {local_rank} sees {seen}; every rank must see all GPUs of its machine, "
            "with srun by --gpus-per-node instead of --gpus-per-task"
        )
    environment = {**os.environ, **rank.variables}
    if rank.variables["RANK"] == "0":
        _note(options, f"started by {rank.who}: every process is one rank; flags about machines have no effect")
    if options.as_deepspeed:
        environment[AS_DEEPSPEED_VARIABLE] = "1"
    environment.update(_rank_logs(options, speaks=rank.variables["RANK"] == "0"))
    environment.update(_own_cores(options, int(rank.variables["LOCAL_WORLD_SIZE"])))
    argv = [sys.executable, "-P", "-u", "-m", "heavylift.launch.entry", *_entry_arguments(options)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, argv, environment)


def _own_cores(options: LaunchOptions, local_world_size: int) -> dict[str, str]:
    """Variables about cores for a rank that something else started.

    srun gives each task cores of its own: they are not to be divided once more. Else every rank of the machine
    divides them in the same way when it is to be bound.
    """
    mask = os.sched_getaffinity(0)
    if local_world_size > 1 and len(mask) * local_world_size <= (os.cpu_count() or 1) and options.core_list is None:
        own = place_ranks(read_topology(mask), [None], num_usable_cores())[0]
        return binding_environment([own] * local_world_size, bind=False)
    if not options.bind_cores:
        return {}
    return binding_environment(machine_places(local_world_size, core_list=options.core_list), bind=True)


def _check_slots(place: NodePlace, gpus: int) -> None:
    missing = [slot for slot in place.slots if slot >= gpus]
    if gpus and missing:
        visible = os.environ.get(VISIBLE_VARIABLE)
        why = f" ({VISIBLE_VARIABLE}={visible})" if visible is not None else ""
        raise UserError(f"host {place.host}: slot {missing[0]} is to be used, but {gpus} GPUs are visible there{why}")


def _check_script(options: LaunchOptions) -> None:
    """Raises UserError when the script, module or program is not there."""
    name = options.script
    if options.no_python:
        if shutil.which(name) is None:
            raise UserError(f"{name}: there is no such program (with --no_python the script is run as it is)")
    elif options.module:
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(name.split(".")[0]) is not None
        except ValueError:
            found = False
        finally:
            del sys.path[0]
        if not found:
            raise UserError(f"--module {name}: Python finds no module of this name, neither here nor installed")
    elif not Path(name).exists():
        raise UserError(f"{name}: there is no such script (in {os.getcwd()})")
    elif Path(name).is_dir() and not (Path(name) / "__main__.py").is_file():
        raise UserError(f"{name}: this is a folder, and has no __main__.py; give the script in it")
    elif not os.access(name, os.R_OK):
        raise UserError(f"{name}: may not be read by this user")
    elif Path(name).suffix.lower() in (".json", ".hjson"):
        # Python runs many of them without a word: a mapping is an expression
        raise UserError(f"{name}: expected a Python script; give the script, and --deepspeed_config {name} behind it")
    elif Path(name).suffix.lower() in (".yaml", ".yml"):
        raise UserError(f"{name}: expected a Python script; for a recipe: heavylift train {name}")


def _rank_logs(options: LaunchOptions, speaks: bool) -> dict[str, str]:
    if options.rank_log_dir is None:
        return {}
    folder = options.rank_log_dir.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--enable_each_rank_log {folder}: cannot be made: {error.strerror}") from None
    prefix = folder / time.strftime("%Y%m%d%H%M%S")
    if speaks:
        _note(options, f"each rank writes to {prefix}_rankN.log")
    return {LOG_VARIABLE: str(prefix)}


def _note_places(options: LaunchOptions, places: Sequence[RankPlace]) -> None:
    several = num_memory_nodes() > 1
    for rank, place in enumerate(places):
        memory = f", memory of node {place.node} first" if several and place.node is not None else ""
        _note(options, f"local rank {rank}: cores {format_cpu_list(place.cpus)}{memory}, threads: {place.num_threads}")


def _note(options: LaunchOptions, text: str) -> None:
    if options.says_notes:
        print(f"note: {text}", file=sys.stderr, flush=True)
