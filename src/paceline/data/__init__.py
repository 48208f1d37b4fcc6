"""Which samples a step sees, how they are read, and the proof that each was seen once."""
