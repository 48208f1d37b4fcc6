from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tests.parallel.distributed.peer_errors_worker import RECORDED, general
from tests.processes import Processes
from torch import distributed as dist

from paceline.core.errors import ConfigError, PeerLostError
from paceline.parallel.peer_errors import translate_peer_errors

WORKER = Path(__file__).parent / "peer_errors_worker.py"

# What the installed torch says, and which of it means that a peer is gone.
GLOO_AND_STORES = {
    "the peer was killed": ("RuntimeError", "Connection closed by peer", True),
    "sent to the killed peer": ("RuntimeError", "Connection closed by peer", True),
    "the peer closed": ("RuntimeError", "Connection closed by peer", True),
    "sent to the closed peer": ("RuntimeError", "Connection closed by peer", True),
    "the peer is late": ("RuntimeError", "Timed out waiting 300ms for recv operation to complete", True),
    "sent to the late peer": ("RuntimeError", "Application timeout caused pair closure", True),
    "no such interface": ("RuntimeError", "Unable to find address for: nowhere0", False),
    "no such key": ("DistStoreError", "wait timeout after 300ms", True),
    "the port is taken": ("DistNetworkError", "EADDRINUSE", False),
    "the server closed": ("DistNetworkError", "Failed to recv, got 0 bytes", True),
    "no server": ("DistNetworkError", "The client socket has timed out", True),
}
MESSAGES = json.loads(RECORDED.read_text())
KINDS = {"RuntimeError": RuntimeError, "DistStoreError": dist.DistStoreError, "DistNetworkError": dist.DistNetworkError}


@pytest.mark.integration
def test_real_errors_of_gloo_and_the_stores(run_processes: Processes) -> None:
    done = run_processes.run([sys.executable, WORKER])
    told = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    assert told.keys() == GLOO_AND_STORES.keys()
    for name, (kind, part, is_lost) in GLOO_AND_STORES.items():
        raw_kind, message, translated = told[name]
        assert raw_kind == kind, message
        assert part in message
        of_release = MESSAGES.get(torch.__version__.partition("+")[0])
        assert of_release is None or of_release[name] == [kind, general(message)]
        if is_lost:
            assert translated.startswith("PeerLostError: another rank is gone: ")
            assert "/gloo/" not in translated
            assert "typically caused" not in translated
        else:
            assert translated == f"{kind}: {message}"


@pytest.mark.parametrize("release", MESSAGES)
def test_what_each_release_of_torch_says_is_recognised(release: str) -> None:
    assert MESSAGES[release].keys() == GLOO_AND_STORES.keys()
    for name, (kind, message) in MESSAGES[release].items():
        raised = KINDS[kind](message)
        error = error_after(raised)
        assert isinstance(error, PeerLostError) if GLOO_AND_STORES[name][2] else error is raised, name


def nccl(result: str, detail: str, last: str) -> str:
    """The text of torch's check of an NCCL call, as its NCCLUtils.cpp writes it."""
    place = "/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690"
    return f"NCCL error in: {place}, {result}, NCCL version 2.28.9\n{detail}\nLast error:\n{last}"


def error_after(raised: Exception) -> Exception:
    try:
        with translate_peer_errors():
            raise raised
    except Exception as error:
        return error
    raise AssertionError


REMOTE = nccl(
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "socketProgress: Connection closed by remote peer node1<43210>",
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            REMOTE,
            "remote process exited or there was a network error, NCCL version 2.28.9: "
            "socketProgress: Connection closed by remote peer node1<43210>",
        ),
        (
            "NCCL communicator was aborted on rank 3. ",
            "NCCL communicator was aborted on rank 3. ",
        ),
        (
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=60000) ran for 60012 milliseconds before timing out.",
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=60000) ran for 60012 milliseconds before timing out.",
        ),
        (
            nccl(
                "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
                "Call to recv from 10.0.0.2<40123> failed : Connection reset by peer",
            ),
            "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9: "
            "Call to recv from 10.0.0.2<40123> failed : Connection reset by peer",
        ),
    ],
)
def test_nccl_lost_a_peer(text: str, told: str) -> None:
    error = error_after(dist.DistBackendError(text))
    assert type(error) is PeerLostError
    assert str(error) == f"another rank is gone: {told}"


@pytest.mark.parametrize(
    ("result", "detail", "last"),
    [
        (
            "invalid usage (run with NCCL_DEBUG=WARN for details)",
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
            "Message truncated : received 8 bytes instead of 4",
        ),
        (
            "invalid argument (run with NCCL_DEBUG=WARN for details)",
            "ncclInvalidArgument: Invalid value for an argument.",
            "Invalid config nChannelsPerNetPeer attribute value 0",
        ),
        (
            "internal error - please report this issue to the NCCL developers",
            "ncclInternalError: Internal check failed.",
            "Net : ncclNetInit failed",
        ),
        (
            "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            "ncclUnhandledCudaError: Call to CUDA function failed.",
            "Cuda failure 700 'an illegal memory access was encountered'",
        ),
        (
            "unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
            "Error while creating shared memory segment /dev/shm/nccl-Xyz (size 9637888), error: No space left on "
            "device (28)",
        ),
    ],
)
def test_faults_of_this_rank_are_not_another_ranks_death(result: str, detail: str, last: str) -> None:
    raised = dist.DistBackendError(nccl(result, detail, last))
    assert error_after(raised) is raised


def test_two_ranks_on_one_gpu_are_an_error_of_the_options() -> None:
    text = nccl(
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000",
    )
    error = error_after(dist.DistBackendError(text))
    assert type(error) is ConfigError
    assert "rank 0 and rank 1 both on CUDA device 1b000" in str(error)
    assert "--nproc" in str(error)


@pytest.mark.parametrize("last", ["Cuda failure 2 'out of memory'", "Failed to CUDA calloc async 608 bytes"])
def test_nccl_without_memory_is_out_of_memory(last: str) -> None:
    text = nccl(
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        last,
    )
    error = error_after(dist.DistBackendError(text))
    assert type(error) is torch.OutOfMemoryError
    assert last in str(error)


@pytest.mark.parametrize("text", ["connection refused by the licence server", "the message was out of memory"])
def test_an_error_of_the_users_own_code_is_left_alone(text: str) -> None:
    raised = RuntimeError(text)
    assert error_after(raised) is raised
