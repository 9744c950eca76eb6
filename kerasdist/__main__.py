"""``python -m kerasdist``, for an environment in which the command ``kerasdist`` is not found."""

from __future__ import annotations

from kerasdist.cli.app import main

if __name__ == "__main__":
    main()
