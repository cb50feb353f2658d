"""`python -m serried` is `serried`."""

from __future__ import annotations

import sys

from serried.cli.main import main

sys.exit(main())
