"""Runs the command line as ``python -m kerasdist``, if the shell does not find ``kerasdist``."""

from __future__ import annotations

from kerasdist.cli.app import main

if __name__ == "__main__":
    main()
