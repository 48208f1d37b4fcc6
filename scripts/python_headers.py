"""Print the Debian package of this Python's headers where they are missing, else nothing."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

if not Path(sysconfig.get_path("include"), "Python.h").is_file():
    print(f"libpython{sys.version_info.major}.{sys.version_info.minor}-dev")
