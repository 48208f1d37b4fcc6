"""``fit`` of Keras 2 (the package tf_keras) under MultiWorkerMirroredStrategy.

paceline launch --on spawn --nproc 2 --env-style tensorflow -- tensorflow_multiworker_tf_keras.py
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import numpy as np
import tensorflow as tf
import tf_keras


def fashion_mnist(directory: Path, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Images in [0, 1] as float32 [samples, 28, 28, 1], and labels as int64 [samples]."""
    with gzip.open(directory / "train-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(16 + samples * 784), np.uint8, offset=16)
    with gzip.open(directory / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(8 + samples), np.uint8, offset=8)
    return images.reshape(-1, 28, 28, 1).astype(np.float32) / 255, labels.astype(np.int64)


def build_model() -> tf_keras.Model:
    """A small convolutional network; its outputs are logits [batch, 10]."""
    return tf_keras.Sequential(
        [
            tf_keras.Input((28, 28, 1)),
            tf_keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            tf_keras.layers.Flatten(),
            tf_keras.layers.Dense(64, activation="relu"),
            tf_keras.layers.Dense(10),
        ]
    )


def main() -> None:
    """Train, and print the last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf_keras.utils.set_random_seed(1)
    batch = options.batch_size * strategy.num_replicas_in_sync
    images, labels = fashion_mnist(options.data, min(60000, batch * options.steps))
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().batch(batch, drop_remainder=True)
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=tf_keras.optimizers.SGD(0.05, momentum=0.9),
            loss=tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(dataset, epochs=1, steps_per_epoch=options.steps, verbose=0).history
    worker = strategy.cluster_resolver.task_id
    print(json.dumps({"worker": worker, "of": strategy.num_replicas_in_sync, "loss": float(history["loss"][-1])}))


if __name__ == "__main__":
    main()
