"""Start processes on this machine, watch them, and leave none behind."""
