"""The launching side of in-place recovery: an agent that starts, watches and replaces workers."""
