"""Ports for the processes of tests."""

from kerasdist.launch.placement import listening


def free_port() -> int:
    """Returns a port of this machine that was free a moment ago."""
    with listening("") as opened:
        return opened.getsockname()[1]
