"""How a step is split over ranks: groups, the exact reduction, strategies."""
