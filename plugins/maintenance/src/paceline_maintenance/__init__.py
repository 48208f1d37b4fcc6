"""``paceline gc``: the removal of runs and packages that nothing needs any more."""
