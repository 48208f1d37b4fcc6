"""Common parts of all rooms: tasks, callbacks, configuration, errors, files, signals. It imports no torch."""
