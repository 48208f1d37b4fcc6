"""mpirun and horovodrun in the script of a Slurm job, compared whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.launch.slurm_specs import joined

from paceline.core.errors import ConfigError
from paceline.launch.launcher import LaunchSpec, SlurmOptions, get_launcher
from paceline.launch.slurm_script import BODIES
from paceline.launch.submit import choose_env_style, choose_rank_launcher


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def job(**fields: object) -> LaunchSpec:
    defaults = {
        "command": ("./hello",),
        "name": "hello",
        "directory": Path("/jobs/hello-1"),
        "python": "python",
    }
    return LaunchSpec(**{**defaults, "nodes": (2, 2), "nproc": (2,), **fields})  # type: ignore[arg-type]


def body(spec: LaunchSpec) -> str:
    assert "#SBATCH --ntasks-per-node=2\n" in get_launcher("slurm").render(spec, SlurmOptions()).text
    return "\n".join(BODIES[spec.rank_launcher](spec, "", True))


SHIELD = "python -P -m paceline.launch.stop_codes --shield"
BEGIN = """\
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
{hosts}stopped=/jobs/hello-1/"stopped-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}-$$"
mkdir -p "$stopped"
export PACELINE_STOP_CODES="$stopped"
starters="$(mktemp -d)"
trap 'rm -r "$starters"' EXIT
"""
LISTENERS = """\
# A step on all nodes passes Slurm's signals to the ranks, until the end of its input.
exec {{ears}}> >(exec srun --overlap --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --gres=none \\
  python -P -m paceline.launch.stop_codes --listen)
listeners=$!
"""
END = """
steps+=("$!")
wait_for "$!"
code=$?
exec {ears}>&- && wait "$listeners"
# The code is that of the rank that failed first. One that ends after a signal leaves its code, so that the others have
# time to save too.
if [ "$code" -ne 0 ]; then
  for failed in "$stopped"/failed-*; do
    [ ! -s "$failed" ] || code=$(cat "$failed")
  done
elif [ -n "$(find "$stopped" -name 'rank-*')" ]; then
  echo "paceline: ranks were killed before they could end" >&2
  code=1
else
  for code_of_rank in $(cat "$stopped"/code-* 2>/dev/null); do
    [ "$code" -eq 75 ] || code=$code_of_rank
  done
fi
rm -r "$stopped\""""


def test_mpirun() -> None:
    assert (
        body(job(rank_launcher="mpi", env_style="mpi"))
        == f"""\
{BEGIN.format(hosts="")}\
# mpirun starts its daemons by srun. By Slurm's signals they would end, and kill ranks that save.
cat >"$starters/srun" <<END
#!/bin/bash
words=()
for word in "\\$@"; do
  case "\\${{word##*/}}" in
    prted | orted | hydra_pmi_proxy | hydra_bstrap_proxy) words+=({SHIELD}) ;;
  esac
  words+=("\\$word")
done
exec "$(command -v srun)" "\\${{words[@]}}"
END
chmod +x "$starters/srun"
{LISTENERS.format(nodes=2)}\
PATH="$starters:$PATH" {SHIELD} mpirun -np 4 --map-by \\
  ppr:2:node:OVERSUBSCRIBE --bind-to none python -P -m paceline.launch.stop_codes ./hello &{END}"""
    )


def test_ranks_have_the_variables_of_torch_as_under_mpirun_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "hello").touch()
    for on in ("mpi", "slurm"):
        launcher = get_launcher(on)
        env_style = choose_env_style(launcher, None, "mpi")
        assert (env_style, choose_rank_launcher(launcher, "mpi", env_style, is_task=False)) == ("torch", "mpi")
    text = body(job(rank_launcher="mpi", env_style=env_style))
    assert "--bind-to none python -P -m paceline.launch.rank --env-style torch --master-port" in joined(text)


def test_horovodrun_on_one_machine() -> None:
    horovod = {"rank_launcher": "horovod", "env_style": "horovod", "interface": "ib0"}
    text = body(job(**horovod, nodes=(1, 1), command=("python", "train.py")))
    hosts = """hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/:2/' | paste -sd, -)"\n"""
    assert text.startswith(BEGIN.format(hosts=hosts))
    assert (
        f"""PATH="$starters:$PATH" {SHIELD} horovodrun -np 2 --gloo --network-interface ib0 -H "$hosts" env """
        """"PATH=$PATH" python -P -m paceline.launch.stop_codes python train.py &"""
    ) in joined(text)
    assert text.endswith(END)


def test_a_number_of_machines_that_may_change_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--nodes 1:2: --rank-launcher mpi needs one number"):
        get_launcher("slurm").render(job(rank_launcher="mpi", nodes=(1, 2)), SlurmOptions())
