"""``paceline join RUN``: add this machine to a running job."""

from __future__ import annotations
