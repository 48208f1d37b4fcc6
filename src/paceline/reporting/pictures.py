"""A model's input as something to look at: a picture where it is one, else its numbers."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
import torch

_MOST = 160  # pixels a side in the page
_NUMBERS = 24


@dataclass(frozen=True)
class Shown:
    """An input: a picture as a ``data:`` address, or text."""

    picture: str | None
    text: str


def show(tensor: torch.Tensor) -> Shown:
    """An input of one sample.

    A tensor (1, H, W) or (3, H, W), or (H, W) of bytes, is a picture. Bytes are shown as they are; of other
    numbers the least is black and the greatest white, since a model's own normalisation is not known.
    """
    if tensor.dim() == 2 and tensor.dtype == torch.uint8:
        tensor = tensor[None]
    if tensor.dim() == 3 and tensor.shape[0] in (1, 3) and min(tensor.shape[1:]) > 1:
        return Shown(_png(tensor), "")
    flat = tensor.reshape(-1)
    shown = [
        f"{value:.4g}" if tensor.is_floating_point() else str(value) for value in flat[:_NUMBERS].tolist()
    ]
    rest = f" … ({flat.numel():,})" if flat.numel() > _NUMBERS else ""
    return Shown(None, " ".join(shown) + rest)


def _png(tensor: torch.Tensor) -> str:
    from PIL import Image

    if tensor.dtype != torch.uint8:
        values = tensor.float().nan_to_num()
        low, high = float(values.min()), float(values.max())
        tensor = ((values - low) * (255 / (high - low) if high > low else 0)).round().to(torch.uint8)
    pixels = np.asarray(tensor[0] if tensor.shape[0] == 1 else tensor.permute(1, 2, 0))
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((_MOST, _MOST))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
