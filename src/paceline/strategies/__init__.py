"""How work and tensors are split over the ranks; one file a strategy."""
