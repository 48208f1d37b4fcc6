"""A look at a task's arithmetic, by what it computes: what is probably not meant gets a warning."""
