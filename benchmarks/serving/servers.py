"""The servers that are measured: started, waited for, ended; and the ConvNet that all serve.

The model is untrained, since speed does not depend on what it knows.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from paceline.core.errors import LaunchError
from paceline.runs.checkpoint_manifest import MANIFEST, FileRecord
from paceline.runs.package_manifest import PackageManifest, Provenance

if TYPE_CHECKING:
    from torch import nn

RECIPE = "fashion-mnist"
WEIGHTS = "weights.safetensors"

_START_TIMEOUT_S = 240.0
_END_TIMEOUT_S = 60.0


def build_classifier(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """The module from pixels to classes, and the model inside of it."""
    import torch

    from paceline_tasks.fashion_mnist import Classifier, FashionMNIST

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = FashionMNIST().build_model().eval()
    return Classifier(model).eval(), model


def write_package(directory: Path, seed: int = 0) -> None:
    """A package with the weights alone, which is served with the built-in task's code and takes no trust."""
    from safetensors.torch import save

    from paceline_tasks.fashion_mnist import FashionMNIST

    _, model = build_classifier(seed)
    inference = FashionMNIST().inference_signature(model)
    weights = save({name: tensor.contiguous() for name, tensor in model.state_dict().items()})
    sha256 = hashlib.sha256(weights).hexdigest()
    manifest = PackageManifest(
        name=RECIPE,
        created="2026-01-01T00:00:00+00:00",
        inputs=inference.inputs,
        outputs=inference.outputs,
        provenance=Provenance(
            run="none",
            task=RECIPE,
            fields={},
            step=0,
            state_version=0,
            model_sha256=sha256,
            data={},
            versions={},
        ),
        files={WEIGHTS: FileRecord(sha256=sha256, size=len(weights))},
        labels=inference.labels,
        probabilities=inference.probabilities,
        label=inference.label,
    )
    directory.mkdir()
    (directory / WEIGHTS).write_bytes(weights)
    (directory / MANIFEST).write_bytes(manifest.to_bytes())


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@contextmanager
def server(name: str, directory: Path, *words: str) -> Iterator[tuple[int, int]]:
    """A contender's server that answers, with more options for ours; its port and its process."""
    port = free_port()
    if name in ("fastapi", "litserve"):
        process = _popen([f"benchmarks.serving.{name}_peer", str(port)])
        address = f"http://127.0.0.1:{port}/docs"
    else:
        write_package(directory / "package")
        process = start_paceline(directory / "package", port, ("--drain-delay", "1ms", *words))
        address = ready_address(port)
    try:
        wait(process, address)
        yield port, process.pid
    finally:
        end(process)


def start_paceline(package: Path, port: int, words: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a ``paceline serve``; it is not ready yet."""
    words = words or ("--drain-delay", "1ms")
    return _popen(["paceline", "serve", str(package), "--task", RECIPE, "--port", str(port), *words])


def _popen(words: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", *words], stdin=subprocess.DEVNULL, env=environment)


def ready_address(port: int) -> str:
    """Where a server of ours says whether it is ready."""
    return f"http://127.0.0.1:{port}/v2/health/ready"


def answers(address: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def wait(process: subprocess.Popen[bytes], address: str) -> None:
    """Wait until a server answers.

    Raises:
        LaunchError: it has ended, or takes too long.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not answers(address):
        if process.poll() is not None:
            raise LaunchError(f"bench: the server ended with code {process.returncode}; see above.")
        if time.monotonic() > deadline:
            raise LaunchError(f"bench: the server did not answer within {_START_TIMEOUT_S:g} s.")
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server with all that it started: first politely, then for certain."""
    tree = [psutil.Process(process.pid)] if process.poll() is None else []
    tree += [child for member in tree for child in member.children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=10)
    for member in alive:
        member.kill()
    process.wait(_END_TIMEOUT_S)
