"""Fine-tuning: forks of runs, weights of another run, LoRA adapters, frozen layers, learning rates of layers."""
