"""Serving compared with FastAPI, LitServe and the model alone, and at five times its capacity."""
