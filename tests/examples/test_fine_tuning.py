"""The data and the parts of the fine-tuning examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.examples.test_models import example

from paceline.core.errors import DataError


@pytest.fixture(scope="module")
def digits() -> Any:
    """Imported once: scikit-learn sets variables of the environment."""
    return example("digits_from_fashion_mnist")


def test_digits_are_as_large_as_clothes_and_no_test_digit_is_trained_on(digits: Any) -> None:
    task = digits.Digits(samples=2000)
    train, test = task.build_dataset("train"), task.build_dataset("test")
    assert task.build_dataset("val") is None
    assert (len(train), len(test)) == (1347, 450)
    images, labels = test.tensors
    assert images.shape == (450, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert images.amax() > 200
    assert sorted(set(labels.tolist())) == list(range(10))
    seen = {image.numpy().tobytes() for image in train.tensors[0]}
    assert not any(image.numpy().tobytes() in seen for image in images)
    inference = task.inference_signature(task.build_model().eval())
    said = inference.module(images[:2])
    assert said["probabilities"].shape == (2, 10)
    assert inference.labels[3] == "3"


def test_licences_are_read_in_parts_that_do_not_overlap(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(range(100)) * 3)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    licences = example("licences_lora").Licences
    task = licences(context=9, root=str(tmp_path))
    of_split = {split: task.build_dataset(split).tensors[0] for split in ("train", "val", "test")}
    assert [len(windows) for windows in of_split.values()] == [2 * 240 // 9, 60 // 9, 60 // 9]
    assert of_split["train"][0].tolist() == list(range(10))
    assert of_split["test"][0].tolist() == list(range(70, 80))
    with pytest.raises(DataError, match="--set root=DIR"):
        licences(root=str(tmp_path / "none")).build_dataset("train")
