"""Strategies for other trade-offs: parameter servers, Hogwild, PipeDream, local SGD, compressed gradients, threads."""
