"""Pipeline parallelism: a model cut into stages, and micro-batches on their way through them."""
