"""What --dry-run prints for Slurm, compared whole; no Slurm is needed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.launch.slurm_specs import SCRIPT, TASK, joined, text

from paceline.core.errors import ConfigError
from paceline.core.job import RecoveryPolicy
from paceline.core.options import parse_gpus
from paceline.launch.launcher import LaunchSpec, SlurmOptions, get_launcher
from paceline.launch.submit import refuse_gpu_type


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)


def test_a_script_with_every_option() -> None:
    assert (
        text(
            SCRIPT,
            SlurmOptions(
                partition="gpu",
                account="me",
                qos="high",
                constraint="a100&ib",
                exclude="gpu[03-04]",
                mem="64G",
                comment='my "best" run',
                module=("cuda/12.4", "openmpi"),
                conda="torch",
                setup=("ulimit -l unlimited",),
                signal_before="5min",
                requeue=True,
                output="logs/%x-%j.log",
                error="logs/%x-%j.err",
                slurm=("nice=100", "contiguous"),
            ),
            command=("/opt/python", "train.py", "--out", "a b"),
            nodes=(2, 2),
            nproc=(4,),
            gpus_per_node=4,
            cpus_per_task=8,
            walltime_s=93784,
            env={"NCCL_DEBUG": "INFO"},
        )
        == """\
# /home/me/jobs/train/job.sh
#!/bin/bash -l
#SBATCH --job-name=train
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/logs/%x-%j.log
#SBATCH --error=/home/me/logs/%x-%j.err
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gres=gpu:4
#SBATCH --time=1-02:03:04
#SBATCH --partition=gpu
#SBATCH --account=me
#SBATCH --qos=high
#SBATCH --constraint=a100&ib
#SBATCH --exclude=gpu[03-04]
#SBATCH --mem=64G
#SBATCH --comment="my \\"best\\" run"
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --nice=100
#SBATCH --contiguous

set -e
module load cuda/12.4
module load openmpi
source "$(conda info --base)/etc/profile.d/conda.sh"
conda activate torch
ulimit -l unlimited
set +e
rm -f /home/me/jobs/train/exit-code
# Bash returns from wait on a signal, although the step continues.
steps=()
signalled=
trap 'signalled=1' INT TERM USR1
wait_for() {
  local code
  signalled=1
  while [ -n "$signalled" ]; do
    signalled=
    wait "$1"
    code=$?
  done
  return "$code"
}

stopped=/home/me/jobs/train/"stopped-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$$"
mkdir -p "$stopped"
export PACELINE_STOP_CODES="$stopped"
srun --kill-on-bad-exit=1 --wait=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=32 \\
  /opt/python -P -m paceline.launch.node --rank-launcher torchrun --nodes 2 --nproc 4 -- \\
  /opt/python train.py --out 'a b' &
steps+=("$!")
wait_for "$!"
code=$?
# The code is that of the rank that failed first. One that ends after a signal leaves its code, so that the others have
# time to save too.
if [ "$code" -ne 0 ]; then
  for failed in "$stopped"/failed-*; do
    [ ! -s "$failed" ] || code=$(cat "$failed")
  done
else
  for code_of_rank in $(cat "$stopped"/code-* 2>/dev/null); do
    [ "$code" -eq 75 ] || code=$code_of_rank
  done
fi
rm -r "$stopped"
# 75: saved, to be restarted. A cancelled job is no longer RUNNING, and must not be requeued.
if [ "$code" -eq 75 ] && ! command -v scontrol >/dev/null; then
  echo "paceline: saved; no scontrol here. Give: scontrol requeue $SLURM_JOB_ID" >&2
elif [ "$code" -eq 75 ] &&
  [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  echo "paceline: saved; back into the queue" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
echo "$code" >/home/me/jobs/train/exit-code
exit "$code"

# submit it
NCCL_DEBUG=INFO \\
  sbatch --parsable /home/me/jobs/train/job.sh
"""
    )


def test_a_task_with_an_agent_on_each_machine() -> None:
    assert (
        text(TASK, nodes=(1, 3), nproc=(2,), walltime_s=600)
        == """\
# /home/me/runs/a/job/job.sh
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/runs/a/job/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --nodes=1-3
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:10:00
#SBATCH --signal=USR1@60
#SBATCH --no-kill
#SBATCH --requeue
# CPUs: the site's default per GPU (DefCpuPerGPU), if any; else one per process. --cpus-per-task N sets another.

rm -f /home/me/runs/a/job/exit-code
# Bash returns from wait on a signal, although the step continues.
steps=()
signalled=
trap 'signalled=1' INT TERM USR1
wait_for() {
  local code
  signalled=1
  while [ -n "$signalled" ]; do
    signalled=
    wait "$1"
    code=$?
  done
  return "$code"
}

# The tasks on a node get its CPUs in equal parts; they share them where nodes differ, or have too few.
share=0
case "$SLURM_JOB_CPUS_PER_NODE" in
  *,*) ;;
  *) share=$((${SLURM_JOB_CPUS_PER_NODE%%[!0-9]*} / 1)) ;;
esac
cpus="--cpus-per-task=$share"
if [ "$share" -eq 0 ]; then
  unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK
  cpus=--overcommit
fi
hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 3))
export PACELINE_JOB_ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$$" PACELINE_NODES="${#hosts[@]}"
export PACELINE_HOSTS="$(IFS=,; echo "${hosts[*]}")"
for rank in "${!hosts[@]}"; do
  export PACELINE_NODE_RANK=$rank
  srun --no-kill --kill-on-bad-exit=0 --wait=0 --nodes=1 --ntasks=1 --ntasks-per-node=1 \\
    --nodelist="${hosts[rank]}" $cpus bash /home/me/runs/a/job/machine.sh /opt/python -P -m \\
    paceline.launch.node --rank-launcher agent --nodes 1:3 --nproc 2 -- /opt/python -m paceline \\
    train fashion-mnist --run-dir /home/me/runs/a &
  steps+=("$!")
done
code=1
finished= stopped=
for step in "${steps[@]}"; do
  wait_for "$step"
  ended=$?
  case "$ended" in
    0) finished=1 ;;
    75) stopped=1 ;;
    *) code=$ended ;;
  esac
done
# The step of a lost node fails, but the others may have finished without it.
if [ -n "$finished" ] && [ -e /home/me/runs/a/result.json ]; then code=0
elif [ -n "$stopped" ]; then code=75; fi
# 75: saved, to be restarted. A cancelled job is no longer RUNNING, and must not be requeued.
if [ "$code" -eq 75 ] && ! command -v scontrol >/dev/null; then
  echo "paceline: saved; no scontrol here. Give: scontrol requeue $SLURM_JOB_ID" >&2
elif [ "$code" -eq 75 ] &&
  [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
  echo "paceline: saved; back into the queue" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
echo "$code" >/home/me/runs/a/job/exit-code
exit "$code"

# /home/me/runs/a/job/machine.sh
#!/bin/bash
# Runs what starts a node's ranks. A job that may lose nodes survives the loss of job.sh's node, but would then not end:
# so wait until that node answers, or Slurm has removed it from the job.
trap : TERM USR1
"$@"
code=$?
setting() { scontrol show config | awk -v name="$1" '$1 == name { print $3 }'; }
port=$(setting SlurmdPort)
for ((attempt = 0; attempt * 5 < $(setting SlurmdTimeout) + 60; attempt++)); do
  read -r script_host nodes <<<"$(squeue --noheader --jobs="$SLURM_JOB_ID" --format='%B %N')"
  [ -n "$nodes" ] || break
  if ! scontrol show hostnames "$nodes" | grep --quiet --line-regexp "$script_host"; then
    echo "paceline: $script_host was lost, where job.sh ran: back into the queue, or the end" >&2
    # A requeue is refused if another node was first, and where no job may return to the queue.
    if ! scontrol requeue "$SLURM_JOB_ID"; then
      [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != RUNNING ] || scancel "$SLURM_JOB_ID"
    fi
    break
  fi
  timeout 5 bash -c "</dev/tcp/$script_host/$port" 2>/dev/null && break
  sleep 5
done
exit "$code"

# submit it
sbatch --parsable /home/me/runs/a/job/job.sh
"""
    )


def test_elastic_torchrun_is_a_step_on_each_machine() -> None:
    """Without restarts torchrun does not continue on fewer machines, so Slurm may end the step."""
    elastic = joined(text(SCRIPT, nodes=(1, 2), recovery=RecoveryPolicy(max_restarts=9)))
    assert "#SBATCH --nodes=1-2\n" in elastic
    # With it, Slurm takes 1-2 nodes of one task each for one task, and gives one node.
    assert "ntasks-per-node=1\n" not in elastic
    assert "#SBATCH --no-kill\n" in elastic
    assert 'export PACELINE_JOB_ID="$SLURM_JOB_ID" PACELINE_NODES="${#hosts[@]}"\n' in elastic
    assert "srun --no-kill --kill-on-bad-exit=0 --wait=0 --nodes=1 --ntasks=1 --ntasks-per-node=1 " in elastic
    assert (
        "bash /home/me/jobs/train/machine.sh /opt/python -P -m paceline.launch.node --rank-launcher torchrun" in elastic
    )
    assert "--nodes 1:2 --nproc 1 --max-restarts 9 -- /opt/python train.py &\n" in elastic
    assert "/home/me/jobs/train/machine.sh\n#!/bin/bash\n" in elastic
    fixed = joined(text(SCRIPT, nodes=(1, 2)))
    assert "no-kill" not in fixed
    assert "machine.sh" not in fixed


def test_an_array_with_a_task_of_slurms_for_each_rank() -> None:
    assert (
        text(
            SCRIPT,
            SlurmOptions(array="0-9%2", exclusive=True, requeue=True),
            command=("/opt/python", "train.py", "--lr={array_index}"),
            nodes=(1, 2),
            nproc=(4,),
            rank_launcher="srun",
        )
        == """\
# /home/me/jobs/train/job.sh
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/jobs/train/slurm-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --nodes=1-2
#SBATCH --ntasks-per-node=4
#SBATCH --array=0-9%2
#SBATCH --exclusive
#SBATCH --requeue
# CPUs: all of each node. --cpus-per-task N sets another number.

rm -f /home/me/jobs/train/exit-code-"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
# Bash returns from wait on a signal, although the step continues.
steps=()
signalled=
trap 'signalled=1' INT TERM USR1
wait_for() {
  local code
  signalled=1
  while [ -n "$signalled" ]; do
    signalled=
    wait "$1"
    code=$?
  done
  return "$code"
}

# The tasks on a node get its CPUs in equal parts; they share them where nodes differ, or have too few.
share=0
case "$SLURM_JOB_CPUS_PER_NODE" in
  *,*) ;;
  *) share=$((${SLURM_JOB_CPUS_PER_NODE%%[!0-9]*} / 4)) ;;
esac
cpus="--cpus-per-task=$share"
if [ "$share" -eq 0 ]; then
  unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK
  cpus=--overcommit
fi
stopped=/home/me/jobs/train/"stopped-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$$"
mkdir -p "$stopped"
export PACELINE_STOP_CODES="$stopped"
srun --kill-on-bad-exit=1 --wait=0 --nodes="$SLURM_JOB_NUM_NODES" \\
  --ntasks=$((SLURM_JOB_NUM_NODES * 4)) --ntasks-per-node=4 $cpus /opt/python -P -m \\
  paceline.launch.rank --env-style torch -- /opt/python train.py --lr="$SLURM_ARRAY_TASK_ID" &
steps+=("$!")
wait_for "$!"
code=$?
# The code is that of the rank that failed first. One that ends after a signal leaves its code, so that the others have
# time to save too.
if [ "$code" -ne 0 ]; then
  for failed in "$stopped"/failed-*; do
    [ ! -s "$failed" ] || code=$(cat "$failed")
  done
else
  for code_of_rank in $(cat "$stopped"/code-* 2>/dev/null); do
    [ "$code" -eq 75 ] || code=$code_of_rank
  done
fi
rm -r "$stopped"
# 75: saved, to be restarted. A cancelled job is no longer RUNNING, and must not be requeued.
if [ "$code" -eq 75 ] && ! command -v scontrol >/dev/null; then
  echo "paceline: saved; no scontrol here. Give: scontrol requeue ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" >&2
elif [ "$code" -eq 75 ] &&
  [ "$(squeue --noheader --jobs="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" --format=%T)" = RUNNING ]; then
  echo "paceline: saved; back into the queue" >&2
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
echo "$code" >/home/me/jobs/train/exit-code-"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
exit "$code"

# submit it
sbatch --parsable /home/me/jobs/train/job.sh
"""
    )


def test_a_script_that_starts_its_own_processes() -> None:
    assert (
        text(
            SCRIPT,
            SlurmOptions(no_requeue=True),
            command=("/opt/python", "main.py", "--dist-url", "tcp://{master_addr}:{master_port}"),
            rank_launcher="spawn",
            env_style="none",
            nodes=(2, 2),
        )
        == """\
# /home/me/jobs/train/job.sh
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/jobs/train/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --no-requeue
# CPUs: the site's default per GPU (DefCpuPerGPU), if any; else one per process. --cpus-per-task N sets another.

rm -f /home/me/jobs/train/exit-code
# Bash returns from wait on a signal, although the step continues.
steps=()
signalled=
trap 'signalled=1' INT TERM USR1
wait_for() {
  local code
  signalled=1
  while [ -n "$signalled" ]; do
    signalled=
    wait "$1"
    code=$?
  done
  return "$code"
}

# The tasks on a node get its CPUs in equal parts; they share them where nodes differ, or have too few.
share=0
case "$SLURM_JOB_CPUS_PER_NODE" in
  *,*) ;;
  *) share=$((${SLURM_JOB_CPUS_PER_NODE%%[!0-9]*} / 1)) ;;
esac
cpus="--cpus-per-task=$share"
if [ "$share" -eq 0 ]; then
  unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK
  cpus=--overcommit
fi
stopped=/home/me/jobs/train/"stopped-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$$"
mkdir -p "$stopped"
export PACELINE_STOP_CODES="$stopped"
srun --kill-on-bad-exit=1 --wait=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 $cpus /opt/python -P \\
  -m paceline.launch.node --rank-launcher spawn --nodes 2 --nproc 1 --env-style none -- \\
  /opt/python main.py --dist-url 'tcp://{master_addr}:{master_port}' &
steps+=("$!")
wait_for "$!"
code=$?
# The code is that of the rank that failed first. One that ends after a signal leaves its code, so that the others have
# time to save too.
if [ "$code" -ne 0 ]; then
  for failed in "$stopped"/failed-*; do
    [ ! -s "$failed" ] || code=$(cat "$failed")
  done
else
  for code_of_rank in $(cat "$stopped"/code-* 2>/dev/null); do
    [ "$code" -eq 75 ] || code=$code_of_rank
  done
fi
rm -r "$stopped"
echo "$code" >/home/me/jobs/train/exit-code
exit "$code"

# submit it
sbatch --parsable /home/me/jobs/train/job.sh
"""
    )


def test_in_an_allocation_there_is_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert (
        text(TASK, nodes=(2, 2), nproc=(2,))
        == """\
# /home/me/runs/a/job/job.sh
#!/bin/bash
# Bash returns from wait on a signal, although the step continues.
steps=()
signalled=
pass_on() {
  signalled=1
  squeue --steps --noheader --jobs="$SLURM_JOB_ID" --format='%i %j' |
    awk -v name="paceline-$$" '$2 == name { print $1 }' | xargs --no-run-if-empty scancel --signal="$1"
}
trap 'pass_on TERM' INT TERM
trap 'pass_on USR1' USR1
wait_for() {
  local code
  signalled=1
  while [ -n "$signalled" ]; do
    signalled=
    wait "$1"
    code=$?
  done
  return "$code"
}

# The tasks on a node get its CPUs in equal parts; they share them where nodes differ, or have too few.
share=0
case "$SLURM_JOB_CPUS_PER_NODE" in
  *,*) ;;
  *) share=$((${SLURM_JOB_CPUS_PER_NODE%%[!0-9]*} / 1)) ;;
esac
cpus="--cpus-per-task=$share"
if [ "$share" -eq 0 ]; then
  unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK
  cpus=--overcommit
fi
hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 2))
export PACELINE_JOB_ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$$" PACELINE_NODES="${#hosts[@]}"
export PACELINE_HOSTS="$(IFS=,; echo "${hosts[*]}")"
for rank in "${!hosts[@]}"; do
  export PACELINE_NODE_RANK=$rank
  srun --no-kill --kill-on-bad-exit=0 --wait=0 --nodes=1 --ntasks=1 --ntasks-per-node=1 \\
    --nodelist="${hosts[rank]}" --job-name="paceline-$$" $cpus /opt/python -P -m \\
    paceline.launch.node --rank-launcher agent --nodes 2 --nproc 2 -- /opt/python -m paceline \\
    train fashion-mnist --run-dir /home/me/runs/a &
  steps+=("$!")
done
code=1
finished= stopped=
for step in "${steps[@]}"; do
  wait_for "$step"
  ended=$?
  case "$ended" in
    0) finished=1 ;;
    75) stopped=1 ;;
    *) code=$ended ;;
  esac
done
# The step of a lost node fails, but the others may have finished without it.
if [ -n "$finished" ] && [ -e /home/me/runs/a/result.json ]; then code=0
elif [ -n "$stopped" ]; then code=75; fi
exit "$code"

# in this allocation
bash /home/me/runs/a/job/job.sh
"""
    )


def test_in_an_allocation_a_step_has_no_more_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    limits = {"nodes": (1, 2), "nproc": (2,), "gpus_per_node": 2, "walltime_s": 5400}
    script = joined(text(SCRIPT, **limits))
    assert "srun --kill-on-bad-exit=1 --wait=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 " in script
    assert ' --job-name="paceline-$$" --gres=gpu:2 --time=01:30:00 $cpus ' in script
    script = joined(text(SCRIPT, rank_launcher="srun", **limits))
    assert '--nodes=2 --ntasks=4 --distribution=arbitrary --nodelist="$layout" ' in script
    assert "awk -v counts='2 2' " in script
    script = joined(text(SCRIPT, nodes=(1, 9)))
    assert "srun --kill-on-bad-exit=1 --wait=0 --nodes=4 --ntasks=4 " in script
    script = joined(text(TASK, **limits))
    assert '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 2))\n' in script
    assert ' --job-name="paceline-$$" --gres=gpu:2 --time=01:30:00 $cpus ' in script


@pytest.mark.integration  # without tasks, scontrol is asked for GPUs
@pytest.mark.parametrize(
    ("variables", "nodes", "nproc", "sizes"),
    [
        ({"SLURM_NTASKS": "4"}, (1, 1), None, ((2, 2), (3, 1))),
        ({"SLURM_NTASKS": "4"}, (2, 2), None, ((2, 2), (3, 1))),
        ({"SLURM_NTASKS": "4"}, (2, 2), (1,), ((2, 2), (1,))),
        ({"SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "2(x3)"}, (2, 2), None, ((2, 2), (2,))),
        # Nobody asked for tasks: Slurm's number is only that of CPUs.
        ({}, (1, 1), None, ((1, 1), None)),
        ({"SLURM_NTASKS": "4"}, (3, 3), None, ((3, 3), None)),
    ],
)
def test_the_layout_of_an_allocation(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    nodes: tuple[int, int],
    nproc: tuple[int, ...] | None,
    sizes: tuple[tuple[int, int], tuple[int, ...] | None],
) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "3,1", **variables}.items():
        monkeypatch.setenv(name, value)
    assert get_launcher("slurm").resolve_sizes(nodes, nproc, None) == sizes


def test_gpus_bring_the_sites_own_number_of_cpus() -> None:
    two = {"nodes": (2, 2), "nproc": (4,), "gpus_per_node": 4}
    script = text(SCRIPT, **two)
    assert "#SBATCH --ntasks-per-node=4\n#SBATCH --gres=gpu:4\n# CPUs: the site's default per GPU" in script
    assert "--cpus-per-task=$share" in script
    script = text(SCRIPT, cpus_per_task=2, **two)
    assert "#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=8\n#SBATCH --gres=gpu:4\n\n" in script
    cpus_only = text(SCRIPT, **{**two, "gpus_per_node": None})
    assert "#SBATCH --ntasks-per-node=4\n# CPUs: the site's default" in cpus_only
    assert "#SBATCH --cpus-per-task" not in cpus_only, "that would take the site's default away"
    exclusive = text(SCRIPT, SlurmOptions(exclusive=True), **two)
    assert "#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:4\n#SBATCH --exclusive\n# CPUs: all of each" in exclusive


@pytest.mark.parametrize("wish", ["gres=gpu:a100:2", "gpus=4", "gpus-per-task=1", "gpus-per-node=1g.5gb:2"])
def test_gpus_in_slurms_own_words(wish: str) -> None:
    script = text(SCRIPT, SlurmOptions(slurm=(wish,)), nproc=(2,))
    assert f"#SBATCH --ntasks-per-node=2\n#SBATCH --{wish}\n# CPUs: the site's default" in script
    # One task on each node starts the ranks, and has the GPUs of both.
    assert (" --gres=gpu:2 $cpus" in script) == ("\nunset SLURM_GPUS_PER_TASK" in script) == (wish == "gpus-per-task=1")
    script = text(SCRIPT, SlurmOptions(slurm=(wish,), constraint="a100"), nproc=(2,), rank_launcher="srun")
    assert f"#SBATCH --ntasks-per-node=2\n#SBATCH --constraint=a100\n#SBATCH --{wish}\n" in script
    assert "--gres=gpu:2 $cpus" not in script


def test_gpus_of_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = {"gpu_type": "a100_1g.5gb", "gpus_per_node": 2}
    assert "#SBATCH --gres=gpu:a100_1g.5gb:2\n" in text(SCRIPT, **typed)
    with pytest.raises(ConfigError, match=r"Give one of them, such as --slurm gres=gpu:a100_1g.5gb:2,license:1"):
        text(SCRIPT, SlurmOptions(slurm=("gres=license:1",)), **typed)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "--gres=gpu:a100_1g.5gb:2 " in joined(text(SCRIPT, **typed))


@pytest.mark.parametrize(
    ("value", "type_and_number"),
    [(2, (None, 2)), ("2", (None, 2)), ("a100:2", ("a100", 2)), ("gpu:1g.5gb:4", ("1g.5gb", 4))],
)
def test_how_gpus_are_written(value: int | str, type_and_number: tuple[str | None, int]) -> None:
    assert parse_gpus(value) == type_and_number
    with pytest.raises(ConfigError, match="must be a number, or on Slurm TYPE:NUMBER, such as a100:2, but is 'a100'"):
        parse_gpus("a100")
    spec = LaunchSpec(command=("true",), gpu_type="a100", gpus_per_node=2)
    with pytest.raises(ConfigError, match="--gpus-per-node a100:2: only --on slurm takes a type"):
        refuse_gpu_type(spec, "ray")


def test_mpirun_and_ray_in_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.mpi.find_mpirun", lambda: ("mpich", "mpiexec.hydra"))
    two = {"nodes": (2, 2), "nproc": (2,), "rank_launcher": "mpi", "env_style": "mpi"}
    script = text(SCRIPT, **two)
    assert "#SBATCH --ntasks-per-node=2\n" in script
    rank = "/opt/python -P -m paceline.launch.stop_codes /opt/python train.py"
    assert f"mpiexec.hydra -n 4 -ppn 2 -bind-to none {rank} &\n" in joined(script)
    script = joined(text(SCRIPT, **{**two, "env_style": "torch", "master_port": 4000}))
    assert "rank --env-style torch --master-port 4000 -- /opt/python" in script
    with pytest.raises(ConfigError, match="--rank-launcher mpi needs one number"):
        text(SCRIPT, **{**two, "nodes": (1, 2)})
    script = joined(text(SCRIPT, nodes=(2, 2), rank_launcher="ray", env_style="none"))
    assert "--ntasks=2 --ntasks-per-node=1 $cpus /opt/python -P -m paceline_ray.node" in script


def test_horovodrun_reaches_the_other_machines_by_steps() -> None:
    script = text(SCRIPT, nodes=(2, 2), nproc=(2,), rank_launcher="horovod", env_style="horovod")
    shield = "/opt/python -P -m paceline.launch.stop_codes --shield"
    expected = r"""
# horovodrun starts ranks on other nodes over ssh. In a job, steps replace ssh, so no node needs an ssh server.
cat >"$starters/ssh" <<END
#!/bin/bash
host=
while [ "\$#" -gt 0 ]; do
  case "\$1" in
    -o | -p | -i) shift 2 ;;
    *) [ -z "\$host" ] || break; host="\$1"; shift ;;
  esac
done
exec srun --overlap --nodes=1 --ntasks=1 --nodelist="\$host" $cpus SHIELD sh -c "\$*" </dev/null
END
chmod +x "$starters/ssh"
"""
    assert expected.replace("SHIELD", shield) in joined(script)
    assert f'PATH="$starters:$PATH" {shield} horovodrun -np 4 --gloo -H "$hosts" env "PATH=$PATH" /opt/py' in joined(
        script
    )
    assert "starters/ssh" not in text(SCRIPT, nproc=(2,), rank_launcher="horovod", env_style="horovod"), (
        "on one there is no need"
    )


def test_lines_of_setup_run_after_modules_but_for_those_that_prepare_them() -> None:
    setup = ("module purge", "ulimit -l unlimited", "ml use /opt/modules", "module list")
    script = text(SCRIPT, SlurmOptions(module=("gcc",), venv="/opt/env", setup=setup))
    lines = script.partition("set -e\n")[2].partition("set +e")[0].splitlines()
    first, last = ["module purge", "ml use /opt/modules"], ["ulimit -l unlimited", "module list"]
    assert lines == [*first, "module load gcc", "source /opt/env/bin/activate", *last]


def test_the_index_of_an_array_may_be_written_as_it_is() -> None:
    script = text(SCRIPT, command=("sh", "-c", "echo {{array_index}}"), rank_launcher="spawn", env_style="none")
    assert "-- sh -c 'echo ''{array_index}' &" in joined(script)


def test_an_activated_environment_has_its_own_python() -> None:
    command = (sys.executable, "train.py")
    script = text(SCRIPT, SlurmOptions(venv="/opt/my env"), command=command, python=sys.executable)
    assert "source '/opt/my env/bin/activate'\n" in script
    assert "python -P -m paceline.launch.node --rank-launcher torchrun --nproc 1 -- python train.py &\n" in joined(
        script
    )
    script = text(SCRIPT, SlurmOptions(venv="/opt/env"))
    assert (
        "/opt/python -P -m paceline.launch.node --rank-launcher torchrun --nproc 1 -- /opt/python train.py &\n"
        in joined(script)
    )


CONTAINER = """\
# The image is run by pyxis, a plug-in of srun, or else by apptainer.
if srun --help | grep --quiet -e --container-image; then
  container=('--container-image=nvcr.io#nvidia/pytorch:25.01-py3' \
--container-mounts=/home/me:/home/me,/data:/data,/scratch/me:/tmp --container-workdir=/home/me)
elif runtime="$(command -v apptainer || command -v singularity)"; then
  container=("$runtime" exec --nv --bind /home/me:/home/me,/data:/data,/scratch/me:/tmp --pwd /home/me \
docker://nvcr.io/nvidia/pytorch:25.01-py3)
else
  echo "paceline: --container needs pyxis (srun --container-image) or apptainer, and $(hostname) has neither." \\
    "Load the site's module with --module apptainer, choose nodes that have it, or leave --container out." >&2
  echo 1 >/home/me/runs/a/job/exit-code
  exit 1
fi
"""


@pytest.mark.integration
def test_a_container_is_run_by_pyxis_or_apptainer_with_its_own_python(tmp_path: Path) -> None:
    image = "docker://nvcr.io/nvidia/pytorch:25.01-py3"
    options = SlurmOptions(container=image, container_mount=("/data", "/scratch/me:/tmp"), module=("apptainer",))
    task = dataclasses.replace(TASK, command=(sys.executable, *TASK.command[1:]), python=sys.executable)
    script = text(task, options, gpus_per_node=2)
    assert CONTAINER in script
    assert script.index("module load apptainer") < script.index("container=(")
    assert f"{sys.executable}" not in script
    step = joined(script)
    assert '$cpus "${container[@]}" bash /home/me/runs/a/job/machine.sh python -P -m paceline.launch.node' in step
    by_rank = joined(text(SCRIPT, SlurmOptions(container="ubuntu:24.04"), rank_launcher="srun", nproc=(2,)))
    assert "--container-image=ubuntu:24.04 --" in by_rank
    assert "exec --bind /home/me:/home/me --pwd /home/me docker://ubuntu:24.04)" in by_rank
    assert '$cpus "${container[@]}" /opt/python -P -m paceline.launch.rank' in by_rank
    from_file = text(SCRIPT, SlurmOptions(container="a.sif"), workdir=tmp_path)
    assert f"--container-image={tmp_path}/a.sif" in from_file
    assert f"--pwd {tmp_path} {tmp_path}/a.sif)" in from_file
    assert f"if [ ! -e {tmp_path}/a.sif ]; then" in from_file  # this machine may not see it
    for written in (script, by_rank, from_file):
        subprocess.run(["bash", "-n"], input=written, text=True, check=True)


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ({"container": "a", "venv": "b"}, {}, "a python of its own. Leave out --conda and --venv"),
        ({"container_mount": ("/a",)}, {}, "--container-mount needs --container"),
        ({"container": "a", "container_mount": ("a",)}, {}, "absolute and without commas, not a:a"),
        ({"container": "a"}, {"rank_launcher": "mpi"}, "starts its ranks outside. Use --rank-launcher srun"),
    ],
)
def test_a_container_that_could_not_run_is_refused(options: Any, changes: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        text(SCRIPT, SlurmOptions(**options), **changes)


def test_preflight_examines_the_python_of_the_environment_that_is_activated() -> None:
    preflight = (sys.executable, "-P", "-m", "paceline_checks.preflight.rank")
    for options in (SlurmOptions(venv="/opt/env"), SlurmOptions(conda="torch")):
        script = joined(text(SCRIPT, options, python=sys.executable, preflight=preflight))
        assert " --preflight 'python -P -m paceline_checks.preflight.rank' " in script
        assert sys.executable not in script


def test_a_task_that_must_not_come_back_is_cancelled_where_nobody_ends_it() -> None:
    script = text(TASK, SlurmOptions(no_requeue=True))
    assert "#SBATCH --no-requeue\n" in script
    # Slurm refuses to requeue such a job.
    assert 'if ! scontrol requeue "$SLURM_JOB_ID"; then' in script
    assert 'back into the queue" >&2' not in script
    assert 'scancel "$SLURM_JOB_ID"' in script


def test_a_task_of_an_array_asks_slurm_for_itself_alone() -> None:
    """One of them has the number of the whole array as its SLURM_JOB_ID."""
    sweep = dataclasses.replace(TASK, run=Path("/home/me/runs/{array_index}"))
    files = get_launcher("slurm").render(sweep, SlurmOptions(array="0-3")).files
    job = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
    assert f"scontrol requeue {job}\n" in files["job.sh"]
    assert f"""<<<"$(squeue --noheader --jobs={job} --format='%B %N')"\n""" in files["machine.sh"]
    assert f"    if ! scontrol requeue {job}; then\n" in files["machine.sh"]
    assert "SLURM_JOB_ID" not in files["machine.sh"]


def test_a_sweep_of_tasks_keeps_its_script_beside_the_runs(run_processes: Any, tmp_path: Path) -> None:
    sweep = ("--array", "0-3", "--seed", "1", "--run-dir", "runs/sweep-{array_index}")
    done = run_processes.paceline("train", "fashion-mnist", "--on", "slurm", "--dry-run", *sweep)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"# {tmp_path}/runs/sweep-array-index-job/job.sh\n")
    assert f'--run-dir {tmp_path}/runs/sweep-"$SLURM_ARRAY_TASK_ID" ' in joined(done.stdout)


@pytest.mark.integration
def test_a_node_without_scontrol_says_how_to_requeue(tmp_path: Path) -> None:
    script = text(TASK)
    last = script[script.index("# 75: saved, to be restarted.") :].partition("\nfi\n")[0] + "\nfi"
    (tmp_path / "bin").mkdir()
    done = subprocess.run(
        ["/bin/bash", "-c", f"code=75\n{last}"],
        env={"PATH": str(tmp_path / "bin"), "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "paceline: saved; no scontrol here. Give: scontrol requeue 7\n"
