"""What came out of a run: the analysis after training, as a page and as JSON; and whether it still holds."""
