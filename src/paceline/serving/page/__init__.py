"""The page at a server's ``/``, where people try a model: files in ``static``; it asks as any client does."""
