"""Pipeline parallelism: stages, schedules, and messages between them."""
