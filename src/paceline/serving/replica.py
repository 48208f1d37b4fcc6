"""The program of a replica: ``python -m paceline.serving.replica FD``.

It loads one model, says that it is ready, and answers one batch after another over the socket pair ``FD``
until the other side closes it. One thread computes on a CPU; more replicas use more cores.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.errors import PacelineError
from paceline.inference import TensorSpec
from paceline.serving import frames
from paceline.serving.servable import ModelSpec, Servable, Source, example


def main(descriptor: int) -> int:
    """Serve the process at the other end of ``descriptor``."""
    # The server drains and then closes the channel; a Ctrl-C in its terminal reaches this process too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The server goes away whenever it likes.
    with socket.socket(fileno=descriptor) as channel, suppress(BrokenPipeError, ConnectionResetError):
        return _load_and_serve(channel)
    return 0


def _load_and_serve(channel: socket.socket) -> int:
    first = frames.receive(channel)
    if first is None:
        return 0
    try:
        servable = load_warm(first[0])
    except PacelineError as error:
        frames.send(channel, frames.encode({"failed": str(error)}))
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        frames.send(channel, frames.encode({"failed": f"{type(error).__name__}: {error}"}))
        return 1
    frames.send(channel, frames.encode({"ready": os.getpid()}))
    while True:
        message = frames.receive(channel)
        if message is None:
            return 0
        header, inputs = message
        try:
            outputs = servable.predict(inputs)
            answer = frames.encode({"id": header["id"]}, outputs)
        except Exception as error:
            answer = frames.encode({"id": header["id"], "error": f"{type(error).__name__}: {error}"})
        frames.send(channel, answer)


def load_warm(header: Mapping[str, Any]) -> Servable:
    """Load the model that a header describes, for this thread, and compute a first batch.

    Raises:
        PackageError, ConfigError: it cannot be loaded here.
    """
    from paceline.serving.loading import load

    spec = spec_from_json(header["spec"])
    if Source(**header["source"]).kind != "onnx":
        import torch

        torch.set_num_threads(header["threads"])
    servable = load(Source(**header["source"]), spec, header["device"])
    # The first calls allocate and choose kernels: not while a client waits.
    for rows in (1, header["max_batch"]):
        servable.predict({name: example(tensor, rows) for name, tensor in spec.inputs.items()})
    return servable


def spec_from_json(record: dict[str, Any]) -> ModelSpec:
    """A :class:`ModelSpec` that ``dataclasses.asdict`` and JSON have been through."""
    tensors = {
        kind: {
            name: TensorSpec(dtype=spec["dtype"], shape=tuple(spec["shape"]))
            for name, spec in record[kind].items()
        }
        for kind in ("inputs", "outputs")
    }
    return ModelSpec(**{**record, **tensors, "labels": tuple(record["labels"])})


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
