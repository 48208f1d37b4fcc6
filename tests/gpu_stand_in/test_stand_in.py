"""The pretended GPUs refuse what real ones refuse, and count what a real host would wait for."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.gpu_stand_in.fixture import GpuStandIn, TrainOnGpus, run_program

TASKS = Path(__file__).parents[1] / "training" / "tasks.py"


def test_one_process(run_processes: Any, gpu_stand_in: GpuStandIn) -> None:
    (done,) = run_program(
        run_processes,
        gpu_stand_in,
        """
        check(torch.cuda.is_available() and torch.cuda.device_count() == 2, "two GPUs")
        check(not torch.cuda.is_initialized(), "counting them does not use them")

        # Operands on different devices.
        here, there, host = torch.ones(3, device="cuda"), torch.ones(3, device="cuda:1"), torch.ones(3)
        check(torch.cuda.is_initialized() and here.device.index == 0, "the current device")
        check("same device" in refused(lambda: here + host), "the host's operand")
        check("same device" in refused(lambda: here.add_(there)), "another device's operand")
        check((here + torch.tensor(1.0)).is_cuda, "a number may be the host's")
        check("invalid device ordinal" in refused(lambda: torch.cuda.set_device(2)), "no such device")
        torch.cuda.set_device(1)
        check(torch.ones(1, device="cuda").device.index == 1, "the device that was set")
        uuids = {str(torch.cuda.get_device_properties(device).uuid) for device in (0, 1)}
        check(len(uuids) == 2, uuids)

        # Each device has its own generator, and only that of the current one is seeded.
        torch.cuda.set_device(0)
        def drawn(device):
            return torch.rand(4, device=device).tolist()
        torch.cuda.manual_seed(7)
        first, other = drawn("cuda:0"), drawn("cuda:1")
        before = torch.rand(1)
        torch.cuda.manual_seed(7)
        check(drawn("cuda:0") == first and drawn("cuda:1") != other, "generators")
        state = torch.cuda.get_rng_state()
        first = drawn("cuda:0")
        torch.cuda.set_rng_state(state)
        check(drawn("cuda:0") == first, "states of generators")

        # What the host waits for.
        waits()
        for wait in (
            here.sum().item, here.tolist, here.cpu, lambda: host.to("cuda"), lambda: here[here > 0], here.nonzero,
            lambda: torch.equal(here, here), torch.cuda.synchronize, torch.accelerator.synchronize,
            torch.cuda.Event().synchronize, torch.cuda.Stream().synchronize, lambda: bool(here.sum() > 1),
            lambda: torch.empty(3).copy_(here, non_blocking=True),
        ):
            wait()
            check(waits() == 1, wait)
        pinned = torch.empty(3, pin_memory=True)
        check(pinned.is_pinned() and not host.is_pinned() and host.pin_memory().is_pinned(), "pinned memory")
        pinned.copy_(here, non_blocking=True)
        here.copy_(host.pin_memory(), non_blocking=True)
        here.mul_(2).matmul(here)
        check(waits() == 0, "no wait")

        # A copy that nothing has waited for.
        check(pinned.tolist() != [1, 1, 1], "too early")
        torch.cuda.synchronize()
        check(pinned.tolist() == [1, 1, 1], "after the wait")
        here.copy_(pinned, non_blocking=True)
        pinned.zero_()
        check("overwritten" in refused(torch.cuda.synchronize), "pinned memory in use")

        # A process that was forked after the first use.
        pid = os.fork()
        if pid == 0:
            os._exit("re-initialize" not in refused(lambda: torch.cuda.set_device(0)))
        check(os.waitpid(pid, 0)[1] == 0, "a fork")
        """,
    )
    assert done.returncode == 0, done.stderr


GROUP = """
    import torch.distributed as dist
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    device = torch.device("cuda", rank)
"""


def test_messages_of_devices_have_no_tags_and_meet_only_each_other(
    run_processes: Any, gpu_stand_in: GpuStandIn
) -> None:
    finished = run_program(
        run_processes,
        gpu_stand_in,
        textwrap.dedent(GROUP)
        + textwrap.dedent(
            """
        # The host's message, posted first, does not meet the device's; tags do not count, the order does.
        if rank == 0:
            works = [dist.isend(torch.full((2,), 9.0), 1, tag=3)]
            works += [dist.isend(torch.full((2,), float(i), device=device), 1, tag=i) for i in range(2)]
            for work in works:
                work.wait()
        else:
            received = [torch.zeros(2, device=device) for _ in range(2)]
            works = [dist.irecv(tensor, 0, tag=1 - i) for i, tensor in enumerate(received)]
            waits()
            for work in reversed(works):
                work.wait()
            check(waits() == 0, "NCCL's wait is the stream's")
            check([tensor[0].item() for tensor in received] == [0, 1], received)
            host = torch.zeros(2)
            dist.recv(host, 0, tag=3)
            check(host[0] == 9, host)

        total = torch.full((3,), rank + 1.0, device=device)
        dist.all_reduce(total)
        check(total.tolist() == [3, 3, 3], total)
        gathered = torch.empty(2, device=device)
        dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank), device=device))
        check(gathered.tolist() == [0, 1], gathered)
        dist.destroy_process_group()
        """
        ),
        ranks=2,
    )
    assert [done.returncode for done in finished] == [0, 0], [done.stderr for done in finished]


@pytest.mark.parametrize(
    ("sends", "receives", "said"),
    [
        (
            "dist.send(torch.ones(3, device=device), 1)",
            "dist.recv(torch.ones(2, device=device), 0)",
            "3 floating-point",
        ),
        (
            "dist.send(torch.ones(2, device=device), 1)",
            "dist.recv(torch.ones(2, device=device, dtype=torch.int64), 0)",
            "received as 2 integer values of 8 bytes",
        ),
        (
            "work = dist.all_reduce(total, async_op=True); dist.send(total, 1); work.wait()",
            "dist.recv(total, 0); dist.all_reduce(total)",
            "after 1 collectives, received as",
        ),
        ("dist.all_reduce(total)", "dist.recv(total, 0)", "would wait for ever"),
        ("dist.all_reduce(total)", "dist.all_reduce(torch.ones(5, device=device))", "ranks differ in allreduce_"),
    ],
)
def test_two_sides_that_differ_are_refused(
    run_processes: Any, gpu_stand_in: GpuStandIn, sends: str, receives: str, said: str
) -> None:
    finished = run_program(
        run_processes,
        gpu_stand_in,
        textwrap.dedent(GROUP)
        + "total = torch.ones(2, device=device)\n"
        + f"if rank == 0:\n    {sends}\nelse:\n    {receives}\n",
        ranks=2,
        GPU_STAND_IN_PATIENCE_S="2",
    )
    assert any(said in done.stderr for done in finished), [done.stderr for done in finished]


def test_gloo_sends_no_message_of_a_device(run_processes: Any, gpu_stand_in: GpuStandIn) -> None:
    program = textwrap.dedent(GROUP).replace("cuda:nccl", "cuda:gloo") + textwrap.dedent(
        """
        total = torch.ones(2, device=device)
        dist.all_reduce(total)
        check(total.tolist() == [2, 2], total)
        check("Bad address" in refused(lambda: dist.isend(total, 1 - rank)), "a device's address")
        """
    )
    finished = run_program(run_processes, gpu_stand_in, program, ranks=2)
    assert [done.returncode for done in finished] == [0, 0], [done.stderr for done in finished]


@pytest.mark.parametrize("launcher", ["inprocess", "spawn", "torchrun"])
def test_each_launcher_trains_on_them(train_on_gpus: TrainOnGpus, launcher: str) -> None:
    ranks = 1 if launcher == "inprocess" else 2
    options = ["--on", launcher, "--nproc", str(ranks), "--recover", "none", "--device", "cuda", "--max-steps", "2"]
    trained = train_on_gpus(f"{TASKS}:Points", *options)
    assert {step.rank for step in trained.steps} == set(range(ranks))
    assert {step.step for step in trained.steps} == {0, 1}
    # The line of Paceline that waits, and the operator.
    assert any(re.fullmatch(r"parallel/grad_buffers\.py:\d+ \w+: .+", cause) for cause in trained.steps[-1].device)
