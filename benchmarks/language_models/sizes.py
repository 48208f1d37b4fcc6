"""The sizes of the suite ``lm``; the two scripts repeat them, as a user's would."""

RANKS = 2
BATCH_SIZE = 4
"""Packs a rank and step."""

CONTEXT = 256
"""Tokens of a pack."""
