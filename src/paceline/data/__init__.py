"""The deterministic order of the data, its loaders, and the ledger that proves each sample was seen once."""
