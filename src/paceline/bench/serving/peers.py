"""The same model behind FastAPI and LitServe: ``python -m paceline.bench.serving.peers NAME PORT``.

Both take ``{"data": [784 numbers]}`` and answer with the label and the probabilities. FastAPI is its
tutorial's: one process, a synchronous function. LitServe has batches of 32, as its documentation advises.
"""

from __future__ import annotations

import sys
from typing import Any

from paceline.bench.serving.model import PIXELS, build_classifier
from paceline.errors import ConfigError


def serve_fastapi(port: int) -> None:
    """Plain FastAPI under uvicorn."""
    import torch
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Picture(BaseModel):
        data: list[int]

    app = FastAPI()
    classifier, _ = build_classifier()

    def predict(picture: Picture) -> dict[str, Any]:
        pixels = torch.tensor(picture.data, dtype=torch.uint8).reshape(1, 1, 28, 28)
        with torch.inference_mode():
            answer = classifier(pixels)
        return {"label": int(answer["label"][0]), "probabilities": answer["probabilities"][0].tolist()}

    # The annotation is a name of this function's, which text could not be resolved to.
    predict.__annotations__["picture"] = Picture
    app.post("/predict")(predict)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def serve_litserve(port: int) -> None:
    """LitServe with one worker."""
    import litserve
    import torch

    class Api(litserve.LitAPI):  # type: ignore[misc,unused-ignore]
        def setup(self, device: str) -> None:
            self.classifier, _ = build_classifier()

        def decode_request(self, request: Any, **kwargs: Any) -> Any:
            return torch.tensor(request["data"], dtype=torch.uint8).reshape(1, 28, 28)

        def batch(self, inputs: list[Any]) -> Any:
            return torch.stack(inputs)

        def predict(self, x: Any, **kwargs: Any) -> Any:
            with torch.inference_mode():
                return self.classifier(x)

        def unbatch(self, output: Any) -> Any:
            return list(zip(output["label"].tolist(), output["probabilities"].tolist(), strict=True))

        def encode_response(self, output: Any, **kwargs: Any) -> Any:
            return {"label": output[0], "probabilities": output[1]}

    api = Api(max_batch_size=32, batch_timeout=0.002)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=60)
    server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False)


def main(name: str, port: int) -> None:
    """Serve until a signal comes."""
    assert PIXELS == 28 * 28
    if name == "fastapi":
        serve_fastapi(port)
    elif name == "litserve":
        serve_litserve(port)
    else:
        raise ConfigError(f"there is no peer {name}.")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
