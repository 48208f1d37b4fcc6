"""A Horovod script for TensorFlow that does not use Paceline.

    horovodrun -np 2 python horovod_tensorflow.py
    paceline launch --on horovod --nproc 2 --python ENV/bin/python -- horovod_tensorflow.py

Horovod works with TensorFlow up to 2.15; scripts/build-horovod --tensorflow ENV makes an environment with it.
"""

from __future__ import annotations

import horovod.tensorflow as hvd
import tensorflow as tf


def main() -> None:
    """Fit a line to points, of which every rank has its own share."""
    hvd.init()
    tf.random.set_seed(hvd.rank())
    x = tf.random.uniform((256, 1))
    y = 3.0 * x - 1.0 + 0.01 * tf.random.normal((256, 1))

    weight, bias = tf.Variable([[0.0]]), tf.Variable([0.0])
    hvd.broadcast_variables([weight, bias], root_rank=0)
    for _ in range(200):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.square(x @ weight + bias - y))
        for variable, gradient in zip((weight, bias), tape.gradient(loss, [weight, bias]), strict=True):
            variable.assign_sub(0.5 * gradient)

    slope, offset = float(weight[0, 0]), float(bias[0])
    print(f"rank {hvd.rank()} of {hvd.size()}: y = {slope:.2f} x {offset:+.2f}", flush=True)


if __name__ == "__main__":
    main()
