"""ZeRO by DeepSpeed, as an optional engine (``--strategy deepspeed``)."""
