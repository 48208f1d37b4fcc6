"""Export of trained models, the inference server and batch prediction."""
