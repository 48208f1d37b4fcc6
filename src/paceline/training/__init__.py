"""The loop, and what it is made of. Read `worker`, `session`, `trainer`, `step`, in this order."""
