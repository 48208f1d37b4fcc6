"""The same model behind LitServe: ``python -m benchmarks.serving.litserve_peer PORT``.

One worker, batches of 32, as its documentation advises.
"""

# Not `from __future__ import annotations`: LitServe reads the type of decode_request's argument.
import sys
from typing import Any

import litserve
import torch
from fastapi import Request

from benchmarks.serving.servers import build_classifier


class ClassifierAPI(litserve.LitAPI):  # type: ignore[misc]
    """What LitServe calls; the worker imports it, so it is here and not in a function."""

    def setup(self, device: str) -> None:
        self.classifier, _ = build_classifier()

    def decode_request(self, request: Request, **kwargs: Any) -> torch.Tensor:
        document: Any = request  # it is the request's JSON
        return torch.tensor(document["data"], dtype=torch.uint8).reshape(1, 28, 28)

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(inputs)

    def predict(self, x: torch.Tensor, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return self.classifier(x)

    def unbatch(self, output: Any) -> list[tuple[int, list[float]]]:
        return list(zip(output["label"].tolist(), output["probabilities"].tolist(), strict=True))

    def encode_response(self, output: tuple[int, list[float]], **kwargs: Any) -> dict[str, Any]:
        return {"label": output[0], "probabilities": output[1]}


if __name__ == "__main__":
    api = ClassifierAPI(max_batch_size=32, batch_timeout=0.002)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=60)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
