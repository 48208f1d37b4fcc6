"""PipeDream: a pipeline that does not drain between steps, and keeps old weights for what is on its way."""
