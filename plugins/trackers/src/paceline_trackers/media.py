"""Images, texts and histograms of a run: a file in its directory, shown by TensorBoard and trackers as well.

Rank 0 writes them, with the step in the name: a step that is repeated after a fault writes the same file.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import TaskError
from paceline.core.files import write_atomically
from paceline.core.plugins import import_library
from paceline.runs.directory import RunDirectory
from paceline.runs.metric_writers import Media, finite
from paceline.runs.monitor import Monitor

if TYPE_CHECKING:
    import numpy as np
    import torch

_log = logging.getLogger(__name__)
_NAME = re.compile(r"\w[\w.@-]*(/\w[\w.@-]*)*", re.ASCII)
_BINS = 64


@dataclass(frozen=True)
class LoggedImage(Media):
    """A PNG file; width and height are in pixels."""

    width: int
    height: int

    @classmethod
    def of(cls, name: str, step: int, path: Path, content: bytes) -> LoggedImage:
        """Take a PNG file's content."""
        from PIL import Image

        with Image.open(io.BytesIO(content)) as picture:
            return cls(name, step, path, content, picture.width, picture.height)

    def summary_value(self) -> Any:
        from tensorboard.compat.proto.summary_pb2 import Summary

        image = Summary.Image(height=self.height, width=self.width, colorspace=4, encoded_image_string=self.content)
        return Summary.Value(tag=self.name, image=image)


@dataclass(frozen=True)
class LoggedText(Media):
    """A text file, UTF-8; TensorBoard shows it as Markdown."""

    def summary_value(self) -> Any:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        return Summary.Value(
            tag=f"{self.name}/text_summary",
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(dtype=DT_STRING, string_val=[self.content]),
        )


@dataclass(frozen=True)
class LoggedHistogram(Media):
    """Numbers in bins of equal widths.

    Attributes:
        counts: of each bin.
        edges: of the bins, one more than there are bins.
    """

    counts: Sequence[int]
    edges: Sequence[float]

    @classmethod
    def of(cls, name: str, step: int, path: Path, content: bytes) -> LoggedHistogram:
        """Take a JSON file's content."""
        written = json.loads(content)
        return cls(name, step, path, content, written["counts"], written["edges"])

    def summary_value(self) -> Any:
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        sums = json.loads(self.content)
        histogram = HistogramProto(
            min=self.edges[0],
            max=self.edges[-1],
            num=sum(self.counts),
            sum=sums["sum"],
            sum_squares=sums["sum_of_squares"],
            bucket_limit=self.edges[1:],
            bucket=self.counts,
        )
        return Summary.Value(tag=self.name, histo=histogram)


_READERS: Mapping[str, Callable[[str, int, Path, bytes], Media]] = {
    ".png": LoggedImage.of,
    ".txt": LoggedText,
    ".json": LoggedHistogram.of,
}


def read_media(directory: RunDirectory, last_step: int) -> list[Media]:
    """Return what a run has logged up to a step, in the order of steps; a damaged file is left out."""
    found: list[Media] = []
    for path in sorted(directory.media.rglob("step-*.*")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            step = int(path.stem.removeprefix("step-"))
            if step <= last_step and path.suffix in _READERS:
                name = path.parent.relative_to(directory.media).as_posix()
                found.append(_READERS[path.suffix](name, step, path, path.read_bytes()))
    return sorted(found, key=lambda media: media.step)


def log_image(name: str, image: torch.Tensor | np.ndarray[Any, Any] | Any) -> None:
    """Log an image of the run that this process trains; does nothing on other ranks than 0, and without a run.

    It is in the run's directory as ``media/NAME/step-00000100.png``, by the steps done, and in TensorBoard and the
    trackers of ``--log-to``. Call it on all ranks alike, from a callback, ``train_step`` or a loop of your own: rank 0
    computes a part of the micro-batches only, so what it sees in ``loss`` depends on the number of ranks.

    Args:
        name: letters, digits, ``_``, ``-``, ``.``, ``@``, and ``/`` between parts.
        image: a tensor or an array, (H, W) or (C, H, W) with 1, 3 or 4 channels, uint8 or floating point from 0 to 1;
            an image of PIL; or a figure of matplotlib.

    Raises:
        TaskError: the name or the image cannot be used.
        ConfigError: Pillow is not installed.
    """

    def encode(step: int, path: Path) -> LoggedImage:
        library = import_library("PIL.Image", "log_image", "report")
        buffer = io.BytesIO()
        if hasattr(image, "savefig"):
            image.savefig(buffer, format="png")
        else:
            picture = image if isinstance(image, library.Image) else library.fromarray(_pixels(name, image))
            picture.save(buffer, format="png")
        return LoggedImage.of(name, step, path, buffer.getvalue())

    _write(name, ".png", encode)


def log_text(name: str, text: str) -> None:
    """Log a text of the run, as :func:`log_image` does, in ``media/NAME/step-00000100.txt``.

    Raises:
        TaskError: the name cannot be used, or ``text`` is not a ``str``.
    """
    if not isinstance(text, str):
        raise TaskError(f"log_text({name!r}, ...) takes a text, not {type(text).__name__}.")
    _write(name, ".txt", lambda step, path: LoggedText(name, step, path, text.encode()))


def log_histogram(name: str, values: torch.Tensor | np.ndarray[Any, Any] | Sequence[float]) -> None:
    """Log how numbers are distributed, as :func:`log_image` does, in ``media/NAME/step-00000100.json``.

    The file has ``counts`` and ``edges`` of 64 bins, the ``sum``, the ``sum_of_squares``, and how many numbers are
    ``nonfinite``, which no bin counts.

    Args:
        values: a tensor, an array or a list, of any shape.

    Raises:
        TaskError: the name or the values cannot be used.
    """

    def encode(step: int, path: Path) -> LoggedHistogram:
        import numpy as np

        try:
            all_values = _array(name, values).astype(np.float64).ravel()
        except (TypeError, ValueError) as error:
            raise TaskError(f"log_histogram({name!r}, ...) takes numbers: {error}.") from error
        kept = all_values[np.isfinite(all_values)]
        counts, edges = np.histogram(kept, bins=_BINS)
        content = {
            "counts": counts.tolist(),
            "edges": edges.tolist(),
            "sum": float(kept.sum()),
            "sum_of_squares": float(kept @ kept),
            "nonfinite": len(all_values) - len(kept),
        }
        return LoggedHistogram.of(name, step, path, json.dumps(finite(content)).encode())

    _write(name, ".json", encode)


def _write(name: str, suffix: str, encode: Callable[[int, Path], Media]) -> None:
    if not _NAME.fullmatch(name):
        raise TaskError(
            f"{name!r} names no image, text or histogram: use letters, digits, _, -, . and @, and / between parts."
        )
    monitor = Monitor.current
    if monitor is None or monitor.rank != 0:
        return
    path = monitor.directory.media / name / f"step-{monitor.step:08d}{suffix}"
    media = encode(monitor.step, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, media.content)
    except OSError as error:
        _log.warning("cannot write %s: %s.", path, error.strerror)
        return
    monitor.write_media(media)


def _array(name: str, values: Any) -> np.ndarray[Any, Any]:
    import numpy as np
    import torch

    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    if hasattr(values, "full_tensor"):
        raise TaskError(f"{name!r} is a sharded tensor: call its full_tensor() on all ranks, and log that.")
    values = values.detach().cpu()
    return np.asarray(values.float() if values.is_floating_point() else values)


def _pixels(name: str, image: Any) -> np.ndarray[Any, Any]:
    """Return an image as PIL takes it: uint8, (H, W) or (H, W, C) with 3 or 4 channels."""
    import numpy as np

    pixels = _array(name, image)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4):
        pixels = pixels[0] if pixels.shape[0] == 1 else np.moveaxis(pixels, 0, -1)
    elif pixels.ndim != 2:
        raise TaskError(
            f"log_image({name!r}, ...) takes (H, W) or (C, H, W) with 1, 3 or 4 channels, not {pixels.shape}."
        )
    if np.issubdtype(pixels.dtype, np.floating):
        pixels = (np.nan_to_num(pixels).clip(0, 1) * 255).round().astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise TaskError(f"log_image({name!r}, ...) takes uint8, or floating point from 0 to 1, not {pixels.dtype}.")
    return np.ascontiguousarray(pixels)
