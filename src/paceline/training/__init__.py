"""The training loop and its parts. Read `worker`, `session`, `trainer`, `step`, in this order."""
