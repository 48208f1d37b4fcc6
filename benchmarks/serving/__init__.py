"""Serving measured beside FastAPI and LitServe, against the model alone, and at five times what it can do."""
