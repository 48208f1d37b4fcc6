"""What a run tells about itself: metrics, the terminal, each rank's state and log, profiles."""
