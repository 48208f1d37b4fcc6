"""From a trained model to answers: export, server, batch prediction."""
