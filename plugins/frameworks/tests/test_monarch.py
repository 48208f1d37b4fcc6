"""``--on monarch``, with Monarch itself: here, on hosts that are there, and on machines of which one is lost."""

from __future__ import annotations

import datetime
import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from plugins.ray.tests.actor_jobs import prepare, spec
from tests.elastic.recovery_nodes.runs import OPTIONS, PATIENT, TASK, Run
from tests.lab.machines import Machines
from tests.processes import children, runs

from paceline.core.errors import ConfigError
from paceline.core.job import RecoveryPolicy
from paceline.launch.launcher import get_launcher
from paceline_frameworks.monarch import MonarchJob, MonarchOptions

pytestmark = [pytest.mark.monarch, pytest.mark.timeout(300)]

TRAIN = ("--microbatches", "12", "--global-batch-size", "96", "--threads", "1", "--seed", "7")

PLACE = """\
import os
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "A")
os.write(1, " ".join(os.environ[name] for name in names).encode() + b"\\n")
os.write(2, b"of Monarch: %d\\n" % sum("HYPERACTOR" in name or "MONARCH" in name for name in os.environ))
"""
LOOP = (
    "import sys\n"
    "from monarch.actor import run_worker_loop_forever\n"
    "run_worker_loop_forever(address=sys.argv[1], ca='trust_all_connections')\n"
)


@pytest.fixture(autouse=True)
def recorded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    (tmp_path / "place.py").write_text(PLACE)


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, str]:
    """Make a certificate authority, and its certificate for localhost; return Monarch's variables for it."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("authority", "localhost")]
    now = datetime.datetime.now(datetime.UTC)
    paths = []
    for key, name, is_authority in zip(keys, names, (True, False), strict=True):
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(names[0])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(keys[0], hashes.SHA256())
        )
        paths.append(tmp_path / f"{'ca' if is_authority else 'tls'}.crt")
        paths[-1].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = tmp_path / "tls.key"
    private.write_bytes(
        keys[1].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    variables = ("HYPERACTOR_TLS_CA", "HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY")
    return dict(zip(variables, map(str, (*paths, private)), strict=True))


@pytest.fixture
def hosts(run_processes: Any, wait_until: Callable[..., None]) -> Callable[[int], dict[str, psutil.Process]]:
    """Start worker loops on loopback; return their processes by address."""

    def start(count: int) -> dict[str, psutil.Process]:
        loops = {}
        for _ in range(count):
            port = run_processes.free_port()
            address = f"tcp://127.0.0.1:{port}"
            started = run_processes.start([sys.executable, "-c", LOOP, address])
            loops[address] = psutil.Process(started.pid)
            wait_until(lambda loop=loops[address]: loop.net_connections("tcp"), "the worker loop listens")
        return loops

    return start


# What would run


def test_a_job_is_rendered_as_a_file_and_a_command(tmp_path: Path) -> None:
    addresses = "tcp://node0:26600, service<2MuAHeDjLCEd>@tcp://node1:26600,tcp://[::1]:26600"
    job = spec(nodes=(2, 2), nproc=(4, 2), env={"A": "b"}, recovery=RecoveryPolicy(max_restarts=2))
    rendered = get_launcher("monarch").render(job, MonarchOptions(hosts=addresses))
    assert (
        rendered.text
        == """\
# /jobs/train/monarch-job.json
{
  "command": ["python", "-P", "-m", "paceline.launch.node", "--rank-launcher", "torchrun", "--nodes", "2", "--nproc", \
"4,2", "--max-restarts", "2", "--", "python", "train.py"],
  "workdir": "/work",
  "env": {"A": "b"},
  "recovers": false,
  "replacements": 3,
  "hosts": ["tcp://node0:26600", "service<2MuAHeDjLCEd>@tcp://node1:26600", "tcp://[::1]:26600"],
  "machines": 2
}

# the job, on 2 of Monarch's hosts
python -P -m paceline_ray.job paceline_frameworks.monarch /jobs/train/monarch-job.json
"""
    )
    file = tmp_path / "monarch-job.json"
    file.write_text(rendered.files["monarch-job.json"])
    assert MonarchJob.read(file).text == rendered.files["monarch-job.json"]


def test_all_hosts_are_nodes_unless_a_number_is_given(tmp_path: Path) -> None:
    launcher = get_launcher("monarch")
    file = tmp_path / "hosts"
    file.write_text("tcp://node0:26600\ntcp://node1:26600\n")
    assert launcher.resolve_sizes((1, 1), (2,), MonarchOptions(hosts=str(file))) == ((2, 2), (2,))
    assert launcher.resolve_sizes((1, 1), (2,), MonarchOptions()) == ((1, 1), (2,))
    three = MonarchOptions(hosts="tcp://a:1,tcp://b:1,tcp://c:1")
    assert launcher.resolve_sizes((2, 2), (2,), three) == ((2, 2), (2,))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"nodes": (2, 2)}, {}, r"--nodes 2 needs as many hosts, but --hosts names 0"),
        ({"nodes": (1, 2)}, {"hosts": "tcp://a:1,tcp://b:1"}, r"--nodes 1:2: .* paceline join"),
        ({"gpus_per_node": 1}, {}, r"--gpus-per-node asks a cluster"),
        ({"walltime_s": 60.0}, {}, r"--walltime does not work with --on monarch"),
        ({"rank_launcher": "spawn", "recovery": RecoveryPolicy(max_restarts=1)}, {}, r"--max-restarts does not work"),
        ({}, {"machine_restarts": -1}, r"--machine-restarts must be at least 0, but is -1"),
        ({}, {"hosts": "node0:26600"}, r"--hosts must be addresses such as tcp://node0:26600, .* 'node0:26600'"),
        ({}, {"hosts": "tcp://node0:0"}, r"--hosts must be addresses"),
        ({}, {"hosts": ","}, r"--hosts ',' names no host"),
        ({}, {"hosts": "tcp://a:1,tcp://a:1"}, r"--hosts names a host more than once"),
        ({}, {"hosts": "tcp://a:1,tls://b:1"}, r"--hosts mixes tcp:// and tls://"),
        ({}, {"hosts": "slurm:my-job"}, r"--hosts slurm:my-job: give the number of the SlurmJob, as in slurm:12"),
        ({}, {"hosts": "kubernetes:team"}, r"give the namespace and the mesh of the KubernetesJob"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        get_launcher("monarch").render(spec(**changes), MonarchOptions(**options))


def test_a_missing_library_names_its_extra(run_processes: Any) -> None:
    program = "import sys; sys.modules['monarch'] = None; from paceline_ray.job import main; "
    job = spec(workdir=Path("/"))
    Path(run_processes._directory, "job.json").write_text(get_launcher("monarch").render(job).files["monarch-job.json"])
    program += "sys.exit(main(['paceline_frameworks.monarch', 'job.json']))"
    done = run_processes.run([sys.executable, "-c", program])
    assert done.returncode == 1
    assert done.stderr.startswith("paceline: Monarch is not installed")
    assert done.stderr.endswith("Run: pip install 'torchmonarch<0.8,>=0.7'\n")


# On this machine


@pytest.mark.parametrize("rank_launcher", ["spawn", "torchrun"])
def test_a_script_runs_as_under_spawn(run_processes: Any, rank_launcher: str) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "monarch", "--nproc", "2", "--rank-launcher", rank_launcher, "--env", "A=b", "--"),
        "place.py",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 0 0 b", "1 2 0 1 b"]
    # Nothing of what Monarch says of itself, and no variable that would make a rank one of its processes.
    assert done.stderr == "of Monarch: 0\n" * 2


def test_a_failure_gives_the_exit_code(run_processes: Any) -> None:
    done = run_processes.paceline(
        *("launch", "--on", "monarch", "--nproc", "2", "--rank-launcher", "spawn", "--"),
        *("sh", "-c", "if [ $RANK = 1 ]; then exit 7; fi; sleep 600"),
    )
    assert done.returncode == 7
    assert done.stderr == "paceline: rank 1 exited with status 7.\n"


def test_a_task_with_a_worker_killed_ends_with_the_bits_of_spawn(run_processes: Any, tmp_path: Path) -> None:
    spawned = run_processes.paceline(
        *("train", "fashion-mnist", "--on", "spawn", "--nproc", "2", *TRAIN, "--max-steps", "60"),
        *("--run-dir", "spawned", "--json"),
    )
    assert spawned.returncode == 0, spawned.stderr
    (tmp_path / "plan" / "kill-100").touch()
    done = run_processes.paceline(
        *("train", "harmed.py:Harmed", "--set", f"plan={tmp_path}/plan", "--on", "monarch", "--nproc", "2"),
        # The end of a worker is seen without it, and a machine that stalls is no fault.
        *(*TRAIN, "--max-steps", "60", "--run-dir", "run", "--heartbeat", "60", "--purity", "off"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["model_sha256"] == json.loads(spawned.stdout.splitlines()[-1])["model_sha256"]
    assert result["recoveries"] == 1
    # Not by another start of the node: its agent has recovered within the step.
    assert "was lost" not in done.stderr
    assert {path.name for path in (tmp_path / "run" / "job").iterdir()} == {"monarch-job.json", "exit-code"}


def test_a_lost_actor_is_replaced_here(run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    """Monarch reports that its process was killed; the run continues from its checkpoint with the same bits."""
    (tmp_path / "small.py").write_text(TASK)
    (tmp_path / "hold").write_text("12")
    options = (*OPTIONS, *PATIENT, "--run-dir", "run", "--nproc", "2")
    started = run_processes.start(
        [sys.executable, "-m", "paceline", "train", "small.py:Small", "--on", "monarch", *options]
    )
    wait_until((tmp_path / "held-12").exists, "the run stands still", 120)
    [actor] = [each for each in children(started.pid, recursive=True) if is_actor(each)]
    actor.kill()
    (tmp_path / "hold").unlink()
    done = run_processes.finish(started)
    assert done.returncode == 0, done.stderr
    assert "was lost: the process this actor was running on failed: Killed(sig=9)" in done.stderr
    alone = run_processes.paceline("train", "small.py:Small", *OPTIONS, "--run-dir", "alone", "--json")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["model_sha256"] == json.loads(alone.stdout.splitlines()[-1])["model_sha256"]


def is_actor(process: psutil.Process) -> bool:
    """Whether this is a process in which Monarch runs an actor."""
    with suppress(psutil.NoSuchProcess):
        return "monarch._src.actor.bootstrap_main" in process.cmdline()
    return False


def test_ctrl_c_saves_and_leaves_nothing(run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    (tmp_path / "plan" / "wait-100").touch()
    started = run_processes.start(
        [
            *(sys.executable, "-m", "paceline", "train", "harmed.py:Harmed", "--set", f"plan={tmp_path}/plan"),
            *("--on", "monarch", *TRAIN, "--max-steps", "100000", "--run-dir", "run", "--purity", "off"),
        ]
    )
    wait_until((tmp_path / "plan" / "here").exists, "the task waits", 120)
    below = children(started.pid, recursive=True)
    assert any(map(is_actor, below))
    started.send_signal(signal.SIGINT)
    (tmp_path / "plan" / "go").touch()
    done = run_processes.finish(started, timeout_s=90)
    assert done.returncode == 130, done.stderr
    assert "everything is saved" in done.stderr
    wait_until(lambda: not any(map(runs, below)), "all processes end")


def test_nothing_outlives_a_killed_command(run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    started = run_processes.start(
        [*(sys.executable, "-m", "paceline", "launch", "--on", "monarch", "--rank-launcher", "spawn"), "--", "waits.py"]
    )
    wait_until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready0").read_text(), "the rank waits")
    below = children(started.pid, recursive=True)
    started.kill()
    wait_until(lambda: not any(map(runs, below)), "all processes end")


def test_a_detached_job_has_logs_and_is_cancelled(
    run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    launch = ("launch", "--on", "monarch", "--nproc", "2", "--rank-launcher", "spawn", "--name", "mine", "--detach")
    done = run_processes.paceline(*launch, "--", "waits.py")
    assert done.returncode == 0, done.stderr
    ready = [tmp_path / "ready0", tmp_path / "ready1"]
    wait_until(lambda: all(path.exists() and path.read_text() for path in ready), "both ranks wait", 90)
    ranks = [psutil.Process(int(path.read_text())) for path in ready]
    [job] = json.loads(run_processes.paceline("jobs", "--json").stdout)
    assert (job["name"], job["status"]["state"]) == ("mine", "running")
    own = psutil.Process(int(job["reference"]["pid"]))
    assert run_processes.paceline("cancel", "mine").returncode == 0
    # Its parent is no process of this test.
    wait_until(lambda: not runs(own), "the job ends", 60)
    assert not any(map(runs, ranks))
    assert "waiting" in run_processes.paceline("logs", "mine").stdout
    assert json.loads(run_processes.paceline("status", "mine", "--json").stdout)["status"]["state"] == "cancelled"


# On hosts that are there


def test_a_script_on_two_hosts(
    hosts: Callable[[int], dict[str, psutil.Process]], run_processes: Any, wait_until: Callable[..., None]
) -> None:
    loops = hosts(2)
    launch = ("launch", "--on", "monarch", "--hosts", ",".join(loops), "--rank-launcher", "spawn")
    done = run_processes.paceline(*launch, "--env", "A=b", "--", "place.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"machine {rank} | {rank} 2 {rank} 0 b" for rank in (0, 1)]
    assert sorted(done.stderr.splitlines()) == ["machine 0 | of Monarch: 0", "machine 1 | of Monarch: 0"]
    # The hosts take the next job, in which one node fails.
    fails = "if [ $RANK = 1 ]; then exit 7; fi; trap '' TERM; while :; do sleep 1; done"
    done = run_processes.paceline(*launch, "--", "sh", "-c", fails)
    assert done.returncode == 7
    assert "paceline: machine 1 (" in done.stderr
    assert "ended with exit code 7" in done.stderr
    wait_until(lambda: not [p for loop in loops.values() for p in children(loop.pid)], "the hosts are idle")
    assert all(map(runs, loops.values()))


def test_a_script_over_tls(certificate: dict[str, str], run_processes: Any, wait_until: Callable[..., None]) -> None:
    address = f"tls://localhost:{run_processes.free_port()}"
    loop = psutil.Process(run_processes.start([sys.executable, "-c", LOOP, address], env=certificate).pid)
    wait_until(lambda: loop.net_connections("tcp"), "the worker loop listens")
    launch = ("launch", "--on", "monarch", "--hosts", address, "--rank-launcher", "spawn", "--env", "A=b")
    done = run_processes.paceline(*launch, "--", "sh", "-c", "echo $RANK $A", env=certificate)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 b\n"


@pytest.mark.slow
def test_a_lost_host_ends_a_script(
    hosts: Callable[[int], dict[str, psutil.Process]],
    run_processes: Any,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    loops = hosts(2)
    started = run_processes.start(
        [
            *(sys.executable, "-m", "paceline", "launch", "--on", "monarch", "--hosts", ",".join(loops)),
            *("--rank-launcher", "spawn", "--", "waits.py"),
        ]
    )
    ready = [tmp_path / "ready0", tmp_path / "ready1"]
    wait_until(lambda: all(path.exists() and path.read_text() for path in ready), "both ranks wait", 90)
    ranks = [psutil.Process(int(path.read_text())) for path in ready]
    list(loops.values())[1].kill()
    done = run_processes.finish(started)
    assert done.returncode == 1
    assert "machine 1 (" in done.stderr
    assert "was lost: " in done.stderr
    assert done.stderr.count("Only tasks under --rank-launcher agent recover from that; this job ends.") == 1
    wait_until(lambda: not any(map(runs, ranks)), "the ranks end")


@pytest.mark.slow
def test_attached_hosts_end_what_a_killed_command_has_left(
    hosts: Callable[[int], dict[str, psutil.Process]],
    run_processes: Any,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    loops = hosts(1)
    launch = ("launch", "--on", "monarch", "--hosts", *loops, "--rank-launcher", "spawn", "--", "waits.py")
    started = run_processes.start([sys.executable, "-m", "paceline", *launch])
    wait_until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready0").read_text(), "the rank waits")
    rank = psutil.Process(int((tmp_path / "ready0").read_text()))
    started.kill()
    wait_until(lambda: not runs(rank), "the rank ends", 120)
    done = run_processes.paceline(*launch[:-1], "true")
    assert done.returncode == 0, done.stderr


def test_hosts_that_do_not_answer_are_named(
    hosts: Callable[[int], dict[str, psutil.Process]], run_processes: Any
) -> None:
    [address] = hosts(1)
    done = run_processes.paceline(
        *("launch", "--on", "monarch", "--hosts", f"{address},tcp://127.0.0.1:1", "--", "waits.py")
    )
    assert done.returncode == 1
    assert "1 of 2 hosts do not answer: tcp://127.0.0.1:1: " in done.stderr
    assert "run_worker_loop_forever" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_lost_host_of_a_task_is_replaced(
    machines: Machines, run_processes: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    """On machines with their own networks: the others continue, and a host beyond ``--nodes`` joins them."""
    nodes = machines(3)
    run = Run(nodes[0].lab, wait_until)
    run.hold(12)
    addresses = [f"tcp://{node.address}:26600" for node in nodes]
    for node, address in zip(nodes, addresses, strict=True):
        node.start([sys.executable, "-c", LOOP, address])
    wait_until(lambda: all(listens(node.pid) for node in nodes), "the worker loops listen")
    started = nodes[0].start(
        [
            *(sys.executable, "-m", "paceline", "train", "small.py:Small", *OPTIONS, *PATIENT, "--run-dir", "run"),
            *("--on", "monarch", "--nodes", "2", "--hosts", ",".join(addresses)),
        ],
        env={"TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    run.wait_for("checkpoint", lambda event: event["step"] == 10, started)
    nodes[1].kill()
    run.hold(14)
    run.wait_for_joiners(1, started, leader=nodes[0])
    run.step_until("group", lambda event: event["nodes"] == 2, started)
    run.go_on()
    assert started.wait(120) == 0, started.text
    assert f"machine 1 ({nodes[1].name}) was lost" in started.text
    (tmp_path / "small.py").write_text(TASK)
    alone = run_processes.paceline("train", "small.py:Small", *OPTIONS, "--run-dir", "alone", "--json")
    assert run.result()["model_sha256"] == json.loads(alone.stdout.splitlines()[-1])["model_sha256"]


def listens(namespace_of: int) -> bool:
    """Whether a process in the network namespace of this one listens at the worker loops' port."""
    lines = Path(f"/proc/{namespace_of}/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{26600:04X}") and line.split()[3] == "0A" for line in lines)
