"""Who am I, under each launcher."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.core.config import RunConfig
from paceline.core.environment import (
    Environment,
    default_threads,
    detect_environment,
    expand_hosts,
    parse_endpoint,
    without_rank_variables,
)
from paceline.core.errors import ConfigError
from paceline.launch.local_run import own_environment

ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
TORCHRUN = {
    **ADDRESS,
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
HOROVOD = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-7@1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3"}
SLURM = {
    "SLURM_JOB_ID": "99",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
    "SLURM_CPUS_ON_NODE": "8",
}
SBATCH_BODY = {"SLURM_JOB_ID": "99", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Environment()),
        (
            TORCHRUN,
            Environment(
                source="torchrun",
                rank=3,
                world_size=4,
                local_rank=1,
                local_world_size=2,
                node_rank=1,
                nodes=2,
                master_addr="localhost",
                master_port=29500,
                restart_count=2,
                job_id="abc",
                uses_agent_store=True,
            ),
        ),
        (
            HOROVOD,
            Environment(
                source="horovod",
                rank=1,
                world_size=2,
                local_rank=1,
                local_world_size=2,
                job_id="127.0.0.1-4711",
            ),
        ),
        (
            OPEN_MPI,
            Environment(
                source="mpi",
                rank=5,
                world_size=6,
                local_rank=1,
                local_world_size=2,
                node_rank=2,
                nodes=3,
                job_id="prterun-host-7@1",
            ),
        ),
        (PMI, Environment(source="mpi", rank=1, world_size=3, local_rank=1, local_world_size=3)),
        (
            SLURM,
            Environment(
                source="slurm",
                rank=4,
                world_size=5,
                local_rank=0,
                local_world_size=1,
                node_rank=2,
                nodes=3,
                job_id="99.0",
                first_host="gpu03",
            ),
        ),
        (SBATCH_BODY, Environment()),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, Environment()),
    ],
    ids=["single", "torchrun", "horovod", "open mpi", "pmi", "srun", "sbatch body", "srun of one task"],
)
def test_each_launcher_says_who_we_are(environ: dict[str, str], expected: Environment) -> None:
    assert detect_environment(environ) == expected


def test_the_first_of_the_order_wins() -> None:
    everything = {**SLURM, **PMI, **OPEN_MPI, **HOROVOD, **TORCHRUN}
    assert detect_environment(everything, rank=0, world_size=2).source == "caller"
    for source, names in (("torchrun", TORCHRUN), ("horovod", HOROVOD), ("mpi", OPEN_MPI), ("mpi", PMI)):
        assert detect_environment(everything).source == source
        everything = {k: v for k, v in everything.items() if k not in names}
    assert detect_environment(everything).source == "slurm"


def test_mpirun_in_an_allocation_is_mpi_although_slurm_says_rank_0() -> None:
    inside = {**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0", **OPEN_MPI}
    assert detect_environment(inside).rank == 5


def test_srun_sets_pmi_rank_but_not_the_local_one() -> None:
    assert detect_environment({**SLURM, "PMI_RANK": "4", "PMI_SIZE": "5"}).source == "slurm"


def test_the_caller_names_the_address() -> None:
    e = detect_environment({}, rank=1, world_size=2, init_url="tcp://127.0.0.1:4000")
    assert (e.rank, e.local_rank, e.master_addr, e.master_port) == (1, 1, "127.0.0.1", 4000)
    assert e.is_single_node


def test_without_local_ranks_a_remote_master_means_one_process_a_machine() -> None:
    e = detect_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "4000"})
    assert (e.local_rank, e.local_world_size, e.source, e.is_single_node) == (0, 1, "variables", False)


def test_an_endpoint_helps_launchers_that_set_no_address() -> None:
    e = detect_environment(OPEN_MPI, rdzv_endpoint="node0:4000")
    assert (e.master_addr, e.master_port) == ("node0", 4000)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK must be a whole number, but is 'x'"),
        ({**TORCHRUN, "RANK": "4"}, "RANK must be between 0 and WORLD_SIZE - 1 = 3, but is 4"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE must be at least 1, but is 0"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE must be between 1 and WORLD_SIZE = 4"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK must be between 0 and LOCAL_WORLD_SIZE - 1 = 1"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT must be a port from 1 to 65535, but is 70000"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, but RANK=0. Set it, or unset the others"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({**HOROVOD, "HOROVOD_SIZE": "1"}, "HOROVOD_RANK must be between 0 and HOROVOD_SIZE - 1 = 0"),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(y2)"},
            r"SLURM_STEP_TASKS_PER_NODE is malformed: '2\(y2\)'",
        ),
        ({**SLURM, "SLURM_NODEID": "3"}, "SLURM_NODEID=3 does not fit"),
    ],
)
def test_wrong_variables_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_environment(environ)


def test_rank_and_world_size_belong_together() -> None:
    with pytest.raises(ConfigError, match="belong together"):
        detect_environment({}, rank=0)
    with pytest.raises(ConfigError, match="init_url must be tcp://HOST:PORT, but is 'file:///x'"):
        detect_environment({}, rank=0, world_size=2, init_url="file:///x")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("login1", "login1"),
        ("gpu[03-07,12],login1", "gpu03"),
        ("rack[1,3]-n", "rack1-n"),
        ("a-1,b-2", "a-1"),
        ("n[7]", "n7"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert expand_hosts(nodes)[0] == host


def test_endpoints() -> None:
    assert parse_endpoint("[::1]:80", "x") == ("::1", 80)
    for wrong in ("host", "host:", ":80", "host:0", "host:99999"):
        with pytest.raises(ConfigError, match="x must be HOST:PORT"):
            parse_endpoint(wrong, "x")


def test_threads_are_asked_for_then_inherited_then_shared() -> None:
    two = Environment(world_size=2, local_world_size=2)
    assert default_threads(two, 3, {"OMP_NUM_THREADS": "5"}, cpus=8) == 3
    assert default_threads(two, None, {"OMP_NUM_THREADS": "5,2"}, cpus=8) == 5
    assert default_threads(two, None, {}, cpus=8) == 4
    assert default_threads(two, None, {}, cpus=1) == 1
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS must be a positive number, but is 'many'"):
        default_threads(two, None, {"OMP_NUM_THREADS": "many"})


def test_threads_under_srun_count_the_jobs_cpus_not_the_tasks_binding() -> None:
    e = detect_environment({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,2,1", "SLURM_NODEID": "0", "SLURM_PROCID": "1"})
    assert default_threads(e, None, SLURM) == 4


@pytest.mark.integration
@pytest.mark.parametrize("users", [None, "1"])
def test_threads_look_through_what_torchrun_sets_by_itself(users: str | None) -> None:
    # A stand-in for the agent: like torchrun, it sets the variable only in its own memory.
    worker = (
        "from paceline.core.environment import *;"
        "print(default_threads(Environment(source='torchrun', world_size=2, local_world_size=2), cpus=8))"
    )
    agent = (
        "import os, subprocess, sys;"
        "os.environ.setdefault('OMP_NUM_THREADS', '1');"
        f"subprocess.run([sys.executable, '-c', {worker!r}], check=True)"
    )
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if users is not None:
        environ["OMP_NUM_THREADS"] = users
    out = subprocess.run(
        [sys.executable, "-c", agent], env=environ, check=True, capture_output=True, text=True, timeout=60
    )
    assert out.stdout.strip() == ("4" if users is None else "1")


@pytest.mark.cold
@pytest.mark.integration
def test_no_torch_is_imported() -> None:
    code = "import sys, paceline.core.environment; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "False"


WORLD_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("variables", "options", "source"),
    [
        (WORLD_OF_ONE, {}, "variables"),
        (WORLD_OF_ONE, {"nproc": 1}, "variables"),
        (WORLD_OF_ONE, {"nproc": 2}, "single"),
        ({**WORLD_OF_ONE, **ADDRESS, "LOCAL_RANK": "0"}, {"nproc": "auto"}, "single"),
        ({**WORLD_OF_ONE, "MASTER_ADDR": "job-0"}, {"nodes": 2}, "single"),
        ({**WORLD_OF_ONE, "TORCHELASTIC_RUN_ID": "a"}, {"nproc": 2}, "single"),
        ({}, {"nproc": 2}, "single"),
        (TORCHRUN, {}, "torchrun"),
        (TORCHRUN, {"nproc": 2}, "torchrun"),  # on each node
        (TORCHRUN, {"nproc": 4}, "torchrun"),  # in all
        (TORCHRUN, {"nproc": 2, "nodes": 2}, "torchrun"),
        (TORCHRUN, {"nproc": "2,2", "nodes": 2}, "torchrun"),
        (TORCHRUN, {"nproc": "auto"}, "torchrun"),
    ],
)
def test_a_world_of_one_is_no_launcher(
    variables: dict[str, str], options: dict[str, object], source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = detect_environment(variables)
    environment = own_environment(RunConfig(**options), options, found)  # type: ignore[arg-type]
    assert environment.source == source
    ignored = found.source != source
    assert capsys.readouterr().err.count("\n") == int(ignored)
    assert ignored or environment == found


def test_a_recorded_number_of_processes_yields_to_a_launcher() -> None:
    torchrun = detect_environment({**WORLD_OF_ONE, "TORCHELASTIC_RUN_ID": "a"})
    assert own_environment(RunConfig(nproc=2), (), torchrun) == torchrun
    assert own_environment(RunConfig(nproc=3), (), detect_environment(TORCHRUN)).world_size == 4
    assert own_environment(RunConfig(nproc=2), (), detect_environment(WORLD_OF_ONE)).source == "single"


@pytest.mark.parametrize("nproc", [1, 3, "1,2"])
def test_a_launcher_of_several_ranks_and_another_nproc(nproc: int | str) -> None:
    with pytest.raises(
        ConfigError, match=rf"--nproc {nproc} does not fit: torchrun has started 4 processes .WORLD_SIZE"
    ):
        own_environment(RunConfig(nproc=nproc), {"nproc"}, detect_environment(TORCHRUN))


def test_processes_of_its_own_are_not_the_rank_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with without_rank_variables():
        assert detect_environment() == Environment()
        assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    assert dict(os.environ) == before
