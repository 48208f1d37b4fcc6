"""Models of other libraries as tasks."""
