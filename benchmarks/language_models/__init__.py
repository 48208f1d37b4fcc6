"""Language models by Paceline, by TRL and by transformers' Trainer: the same model, texts and batch size."""
