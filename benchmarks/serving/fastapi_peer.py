"""The same model behind plain FastAPI: ``python -m benchmarks.serving.fastapi_peer PORT``.

As in its tutorial: one process, a pydantic model, a synchronous function.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.serving.servers import build_classifier


class Picture(BaseModel):
    """What is asked: 784 numbers."""

    data: list[int]


app = FastAPI()
classifier, _ = build_classifier()


@app.post("/predict")
def predict(picture: Picture) -> dict[str, Any]:
    """The label and the probabilities."""
    pixels = torch.tensor(picture.data, dtype=torch.uint8).reshape(1, 1, 28, 28)
    with torch.inference_mode():
        answer = classifier(pixels)
    return {"label": int(answer["label"][0]), "probabilities": answer["probabilities"][0].tolist()}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
