"""The strategy in force outside every scope: plain Keras on one device."""

from __future__ import annotations

from typing import final

from kerasdist.api.strategy import Strategy


@final
class DefaultStrategy(Strategy):
    """Plain Keras: one replica, on the device that Keras picks."""

    def __init__(self) -> None:
        """Makes the default strategy; `kerasdist.get_strategy` returns the existing one."""
        super().__init__(None)

    def __str__(self) -> str:
        return "DefaultStrategy()"
