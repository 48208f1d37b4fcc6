"""The lengths and weights of a run's samples in its directory, so that others can recompute the order."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import RunDirectoryError, UserError
from paceline.core.files import write_atomically
from paceline.data.order import DeterministicSampler, WeightedDraws

if TYPE_CHECKING:
    from paceline.runs.directory import RunDirectory

_FIELDS = {True: "with_replacement", False: "without_replacement"}


def save_order(run: RunDirectory, order: DeterministicSampler | None) -> None:
    """Save the lengths of a balanced order, and the weights of a weighted one; remove the files of other orders."""
    for path, array in _arrays(run, order).items():
        if array is None:
            path.unlink(missing_ok=True)
            continue
        content = io.BytesIO()
        np.save(content, array, allow_pickle=False)
        write_atomically(path, content.getvalue())


def restore_order(order: DeterministicSampler | None, run: RunDirectory) -> DeterministicSampler | None:
    """Return an order with the saved weights and lengths, if there are any.

    Raises:
        RunDirectoryError: a file does not fit the order.
    """
    if order is None:
        return None
    weights, lengths = _load(run.sample_weights), _load(run.sample_lengths)
    if weights is not None:
        names = [name for name in _FIELDS.values() if weights.dtype == [(name, np.float64)] and weights.ndim == 1]
        if not names:
            raise RunDirectoryError(f"{run.sample_weights} must contain weights, but contains {_describe(weights)}.")
        replacement = names[0] == _FIELDS[True]
        try:
            order = replace(order, draws=WeightedDraws(weights[names[0]], replacement))
        except UserError as error:
            raise RunDirectoryError(f"{run.sample_weights}: {error}") from error
    if lengths is not None:
        if lengths.shape != (order.dataset_size,) or lengths.dtype != np.int64:
            raise RunDirectoryError(
                f"{run.sample_lengths} must contain the lengths of {order.dataset_size} samples, int64, but contains "
                f"{_describe(lengths)}."
            )
        order = replace(order, lengths=lengths)
    return order


def require_same_order(order: DeterministicSampler | None, run: RunDirectory) -> None:
    """Reject sample lengths and weights other than those with which the run was created.

    Raises:
        RunDirectoryError: they differ.
    """
    for path, array in _arrays(run, order).items():
        saved = _load(path)
        same = array is saved if array is None or saved is None else _are_equal(array, saved)
        if not same:
            name = "sample_weights" if path == run.sample_weights else "sample_lengths"
            raise RunDirectoryError(
                f"the task's {name} differ from those in {path}, with which the run was created, so its micro-batches "
                "would have other samples. Restore the task, or start a new run with another --run-dir DIR."
            )


def _arrays(run: RunDirectory, order: DeterministicSampler | None) -> dict[Path, NDArray[Any] | None]:
    draws = None if order is None else order.draws
    weights = None if draws is None else draws.weights.view([(_FIELDS[draws.replacement], np.float64)])
    return {run.sample_weights: weights, run.sample_lengths: None if order is None else order.lengths}


def _are_equal(array: NDArray[Any], saved: NDArray[Any]) -> bool:
    return array.dtype == saved.dtype and array.shape == saved.shape and bool(np.all(array == saved))


def _load(path: Path) -> NDArray[Any] | None:
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error


def _describe(array: NDArray[Any]) -> str:
    return f"{array.dtype} of shape {array.shape}"
