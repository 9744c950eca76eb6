"""``python -m kerasdist``, where the command ``kerasdist`` is not on the path."""

from __future__ import annotations

from kerasdist.cli.app import main

if __name__ == "__main__":
    main()
