"""Questions about runs: reports, dashboard, comparisons, fault injection, clean-up."""
