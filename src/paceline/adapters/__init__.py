"""Models of other frameworks as Paceline tasks."""
