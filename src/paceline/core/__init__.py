"""What all other rooms use: tasks, callbacks, configuration, errors, files, signals. It imports no torch."""
