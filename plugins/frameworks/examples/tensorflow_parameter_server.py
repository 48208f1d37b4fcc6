"""Parameter servers: a chief hands steps to workers, which read and change variables that live on servers.

paceline launch --on spawn --nproc 5 --env-style tensorflow --roles chief=1,worker=2,ps=1,evaluator=1 \
    -- tensorflow_parameter_server.py --checkpoints /tmp/checkpoints

Workers and servers serve for ever; the launcher ends them once the chief has ended.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

CLASSES, PIXELS, HIDDEN = 10, 784, 64


def fashion_mnist(directory: Path, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Images in [0, 1] as float32 [samples, 784], and labels as int64 [samples]."""
    with gzip.open(directory / "train-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(16 + samples * PIXELS), np.uint8, offset=16)
    with gzip.open(directory / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(8 + samples), np.uint8, offset=8)
    return images.reshape(-1, PIXELS).astype(np.float32) / 255, labels.astype(np.int64)


class Network(tf.Module):  # type: ignore[misc]
    """Two dense layers; logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        spread = tf.random.stateless_normal
        self.w1 = tf.Variable(spread((PIXELS, HIDDEN), seed=(1, 1)) / PIXELS**0.5)
        self.b1 = tf.Variable(tf.zeros(HIDDEN))
        self.w2 = tf.Variable(spread((HIDDEN, CLASSES), seed=(1, 2)) / HIDDEN**0.5)
        self.b2 = tf.Variable(tf.zeros(CLASSES))

    def loss(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """The mean cross entropy of images [batch, 784] and labels [batch]."""
        logits = tf.nn.relu(images @ self.w1 + self.b1) @ self.w2 + self.b2
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def train(resolver: tf.distribute.cluster_resolver.ClusterResolver, options: argparse.Namespace) -> None:
    """What the chief does."""
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        network = Network()
    checkpoint = tf.train.Checkpoint(network=network, step=tf.Variable(0, dtype=tf.int64))

    def dataset() -> tf.data.Dataset:
        samples = fashion_mnist(options.data, 64 * options.steps)
        return tf.data.Dataset.from_tensor_slices(samples).shuffle(4096).repeat().batch(64)

    @tf.function  # type: ignore[untyped-decorator]
    def step(batches: Iterator[object]) -> tf.Tensor:
        def on_worker(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = network.loss(images, labels)
            variables = network.trainable_variables
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.1 * gradient)
            return loss

        return strategy.run(on_worker, args=next(batches))

    batches = iter(coordinator.create_per_worker_dataset(dataset))
    losses = [coordinator.schedule(step, args=(batches,)) for _ in range(options.steps)]
    coordinator.join()
    checkpoint.step.assign(options.steps)
    if options.checkpoints is not None:
        checkpoint.save(str(options.checkpoints / "checkpoint"))
    first, last = (float(np.mean([loss.fetch() for loss in part])) for part in (losses[:10], losses[-10:]))
    print(json.dumps({"role": "chief", "first": first, "last": last}), flush=True)


def evaluate(options: argparse.Namespace) -> None:
    """What the evaluator does: the loss of each checkpoint, until that of the last step."""
    network, step = Network(), tf.Variable(0, dtype=tf.int64)
    samples = fashion_mnist(options.data, 2000)
    for path in tf.train.checkpoints_iterator(str(options.checkpoints)):
        tf.train.Checkpoint(network=network, step=step).restore(path).expect_partial()
        loss = float(network.loss(*samples))
        print(json.dumps({"role": "evaluator", "step": int(step), "loss": loss}), flush=True)
        if int(step) == options.steps:
            return


def main() -> None:
    """Be what TF_CONFIG says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, help="a directory that all processes share")
    options = parser.parse_args()
    role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    if role == "evaluator":
        evaluate(options)
        return
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if role == "chief":
        train(resolver, options)
    else:
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=role, task_index=resolver.task_id, protocol="grpc"
        )
        server.join()


if __name__ == "__main__":
    main()
