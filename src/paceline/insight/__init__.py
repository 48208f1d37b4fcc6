"""What one asks about runs: reports, the dashboard, comparisons, faults, clean-up."""
