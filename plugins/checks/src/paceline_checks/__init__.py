"""Checks of machines and recovery: the speed of collectives, and training under injected faults."""
