"""A training loop of one's own with Keras layers, under MultiWorkerMirroredStrategy.

paceline launch --on spawn --nproc 2 --env-style tensorflow -- tensorflow_multiworker.py
paceline launch --on ssh --hosts node0,node1 --env-style tensorflow -- tensorflow_multiworker.py

TF_CONFIG tells each process all workers' addresses and which of them it is. Keras 3 cannot ``fit`` under this
strategy; its layers can be trained so. For ``fit`` see tensorflow_multiworker_tf_keras.py.
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
    """Train, and print the last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    batch = options.batch_size * strategy.num_replicas_in_sync
    images, labels = fashion_mnist(options.data, min(60000, batch * options.steps))
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().batch(batch, drop_remainder=True)
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    @tf.function  # type: ignore[untyped-decorator]
    def step(batches: object) -> tf.Tensor:
        def on_replica(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(
                    loss_of(labels, model(images, training=True)), global_batch_size=batch
                )
            gradients = tape.gradient(loss, model.trainable_variables)
            gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
            optimizer.apply(gradients)
            return loss

        losses = strategy.run(on_replica, args=batches)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    loss = tf.constant(0.0)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(options.steps):
        loss = step(next(batches))
    worker = strategy.cluster_resolver.task_id
    weights = float(sum(np.abs(weight).sum() for weight in model.get_weights()))
    print(json.dumps({"worker": worker, "of": strategy.num_replicas_in_sync, "loss": float(loss), "weights": weights}))


if __name__ == "__main__":
    main()
