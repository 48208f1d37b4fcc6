"""Pages: reports on runs, and the dashboard."""
