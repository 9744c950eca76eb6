"""The process of a worker: ``python -m kerasdist_ray FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from kerasdist_ray.process import run

run(Path(sys.argv[1]))
