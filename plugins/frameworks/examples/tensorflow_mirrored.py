"""Keras ``fit`` under MirroredStrategy: one process, every GPU of the machine, or several logical CPUs.

paceline launch --on spawn --env-style tensorflow -- tensorflow_mirrored.py --replicas 2
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf


def fashion_mnist(directory: Path, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Images in [0, 1] as float32 [samples, 28, 28, 1], and labels as int64 [samples]."""
    with gzip.open(directory / "train-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(16 + samples * 784), np.uint8, offset=16)
    with gzip.open(directory / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(8 + samples), np.uint8, offset=8)
    return images.reshape(-1, 28, 28, 1).astype(np.float32) / 255, labels.astype(np.int64)


def build_model() -> keras.Model:
    """A small convolutional network; its outputs are logits [batch, 10]."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    """Train, and print the last loss and accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--replicas", type=int, default=2, help="logical CPUs, where there is no GPU")
    parser.add_argument("--batch-size", type=int, default=64, help="of each replica")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        [cpu] = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(options.replicas)]
        )
    strategy = tf.distribute.MirroredStrategy(None if devices else tf.config.list_logical_devices("CPU"))

    keras.utils.set_random_seed(1)
    batch = options.batch_size * strategy.num_replicas_in_sync
    images, labels = fashion_mnist(options.data, min(60000, batch * options.steps))
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().batch(batch, drop_remainder=True)
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(dataset, epochs=1, steps_per_epoch=options.steps, verbose=0).history
    print(
        json.dumps(
            {
                "replicas": strategy.num_replicas_in_sync,
                "loss": history["loss"][-1],
                "accuracy": history["accuracy"][-1],
            }
        )
    )


if __name__ == "__main__":
    main()
