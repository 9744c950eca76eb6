"""Reads environment variables, with errors that say what is wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import final

from kerasdist.cluster import ports
from kerasdist.errors import ClusterError


@final
class Variables:
    """The environment variables, as one source of a cluster reads them."""

    def __init__(self, environ: Mapping[str, str] | None, source: str) -> None:
        self._environ = os.environ if environ is None else environ
        self._source = source

    @property
    def all(self) -> Mapping[str, str]:
        """All variables."""
        return self._environ

    def has(self, *names: str) -> bool:
        """Returns whether all of `names` are set and not empty."""
        return all(self._environ.get(name) for name in names)

    def text(self, name: str) -> str:
        """Returns a required variable."""
        text = self._environ.get(name, "").strip()
        if not text:
            raise ClusterError(
                f"Expected the variable {name}, as other variables of {self._source} are set. "
                f"Received: {name}={self._environ.get(name)!r}. Set it, or unset the others."
            )
        return text

    def integer(self, name: str) -> int:
        """Returns a required whole number, 0 or more."""
        text = self.text(name)
        if not text.isdecimal():
            raise ClusterError(
                f"Expected the variable {name} of {self._source} to be a whole number. "
                f"Received: {name}={text!r}."
            )
        return int(text)

    def optional_text(self, *names: str) -> str | None:
        """Returns the value of the first variable in `names` that is set, or None."""
        return next((self.text(name) for name in names if self.has(name)), None)

    def optional_integer(self, *names: str) -> int | None:
        """Returns the first of these variables that is set, as a whole number, or None."""
        return next((self.integer(name) for name in names if self.has(name)), None)

    def coordinator(self, otherwise: str | None) -> str | None:
        """Returns ``KERASDIST_COORDINATOR`` if it is set, else `otherwise`."""
        if not self.has(ports.COORDINATOR_VARIABLE):
            return otherwise
        text = self.text(ports.COORDINATOR_VARIABLE)
        return ports.join(*ports.split(text, ports.COORDINATOR_VARIABLE))
