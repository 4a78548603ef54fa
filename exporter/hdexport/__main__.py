"""``python -m hdexport`` is the command ``hdexport``."""

from __future__ import annotations

import sys

from hdexport.cli import main

sys.exit(main())
