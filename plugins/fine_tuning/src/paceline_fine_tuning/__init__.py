"""Fine-tuning: the weights of another run, LoRA adapters, frozen layers, learning rates of layers."""
