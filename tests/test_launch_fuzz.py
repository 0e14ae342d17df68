"""Whatever is typed at the launcher, or stands in a hostfile or a variable: a UserError of whole lines, or taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heavylift.errors import UserError
from heavylift.launch.hostfile import choose, read_hostfile
from heavylift.launch.multinode import read_environment_file
from heavylift.launch.options import parse_options
from heavylift.launch.placement import limit_cores
from heavylift.launch.resctrl_schemata import parse_shares
from heavylift.launch.slurm import expand_nodes
from heavylift.launch.surroundings import Rank, surroundings
from heavylift.launch.topology import format_cpu_list, parse_cpu_list

FLAGS = (
    "-H --hostfile -i --include -e --exclude --num_nodes --num_gpus --num-accelerators --master_port --master_addr "
    "--node_rank --launcher --launcher_args --module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi "
    "--save_pid --enable_each_rank_log --bind_cores_to_rank --bind_core_list --ssh_port --venv_script --log_level -q "
    "--as-deepspeed --resctrl --elastic_training --autotuning --world_info --no-such-flag --num_gpus=2 --include= -- -"
).split()
WORDS = st.sampled_from(["", "2", "-1", "0", "x", "a:0,2@b", "a:0-", "0-3", "ssh", "slurm", "step=70", "'", "1e9", "é"])
LISTS = st.text(alphabet="ab012,-:@[]x= ", max_size=12)


def one_line_each(error: UserError) -> bool:
    return all(problem and "\n" not in problem for problem in error.problems)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(FLAGS), WORDS), max_size=7))
def test_command_lines(arguments: list[str]) -> None:
    try:
        options = parse_options([*arguments, "script.py", "--its-own"])
    except UserError as error:
        assert one_line_each(error)
    else:
        assert options.script and (options.num_gpus is None or options.num_gpus >= 1)


@settings(max_examples=300, deadline=None)
@given(LISTS, st.booleans())
def test_filters(text: str, includes: bool) -> None:
    hosts = {"a": 3, "b": 1}
    try:
        chosen = choose(hosts, text if includes else None, None if includes else text)
    except UserError as error:
        assert one_line_each(error)
    else:
        assert chosen and all(0 <= slot < hosts[host] for host, slots in chosen.items() for slot in slots)
        assert all(len(set(slots)) == len(slots) > 0 for slots in chosen.values())


@settings(max_examples=200, deadline=None)
@given(LISTS)
def test_lists_of_cores_shares_and_nodes(text: str) -> None:
    try:
        assert set(limit_cores(range(3), text)) <= {0, 1, 2}
    except ValueError as error:
        assert str(error)
    try:
        assert sum(parse_shares(text).values()) <= 100
    except UserError as error:
        assert one_line_each(error)
    try:
        assert all(isinstance(name, str) for name in expand_nodes(text))
    except UserError as error:
        assert one_line_each(error)


@given(st.sets(st.integers(0, 300)))
def test_core_lists_come_back(cpus: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus)) == sorted(cpus)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_files(tmp_path: Path, content: bytes) -> None:
    for name in ("hosts", ".deepspeed_env"):
        (tmp_path / name).write_bytes(content)
    for read in (lambda: read_hostfile(tmp_path / "hosts"), lambda: read_environment_file({}, [tmp_path])):
        try:
            read()
        except UserError as error:
            assert one_line_each(error)


VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT PET_NNODES PET_NODE_RANK PET_MASTER_ADDR "
    "PET_MASTER_PORT SLURM_JOB_ID SLURM_STEP_NUM_TASKS SLURM_PROCID SLURM_NODEID SLURM_LOCALID SLURM_STEP_NODELIST "
    "SLURM_STEP_TASKS_PER_NODE OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"
).split()


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(VARIABLES), st.sampled_from(["", "0", "1", "4", "x", "n[1-2]", "2(x2)"])))
def test_variables_of_those_who_may_have_started_us(environment: dict[str, str]) -> None:
    try:
        found = surroundings(environment)
    except UserError as error:
        assert one_line_each(error)
    else:
        if isinstance(found, Rank):
            assert int(found.variables["LOCAL_RANK"]) >= 0 and int(found.variables["LOCAL_WORLD_SIZE"]) >= 0


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options(["--help"])
    assert end.value.code == 0 and "--bind_cores_to_rank" in capsys.readouterr().out
