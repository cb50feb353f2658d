"""The faults are injected into the worlds of tests/dist."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
