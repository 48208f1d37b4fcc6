"""The page at a server's ``/`` for trying a model: static files that call the server like any client."""
