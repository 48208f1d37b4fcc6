"""Export: a trained model as a package that needs no user code, compared with the model that was trained."""
