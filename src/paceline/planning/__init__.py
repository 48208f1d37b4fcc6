"""Memory and time of a task under each strategy, before a machine is there."""
