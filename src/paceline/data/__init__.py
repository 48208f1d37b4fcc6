"""Which samples a step sees, how they are fetched, and the proof that each was seen once."""
