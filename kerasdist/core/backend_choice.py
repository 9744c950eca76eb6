"""Keras's choice of a backend, by Keras's own rules, without importing it."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

VARIABLE = "KERAS_BACKEND"
"""The variable that chooses the backend."""

KNOWN = ("tensorflow", "jax", "torch")
"""The backends that kerasdist has an engine for; also the names of their packages."""

TESTED = {
    "keras": ("3.12.0", "3.15.1"),
    "tensorflow": ("2.18.0", "2.20.0", "2.21.0"),
    "jax": ("0.8.2", "0.10.2", "0.12.0.1"),
    "torch": ("2.9.0", "2.13.0", "2.14.1", "2.15.0"),
}
"""The releases that passed in docs/versions.md."""

WANT_PROCESS_A_DEVICE = ("torch",)
"""The backends on which several GPUs compute faster with a process each than in one process."""

_OTHERS = ("numpy", "openvino")  # backends of Keras that only infer


@final
@dataclass(frozen=True)
class BackendChoice:
    """The backend that Keras would take.

    Attributes:
        name: Its name, as the variable or file spells it.
        reason: The source: ``"KERAS_BACKEND"``, a file, or ``"Keras's default"``.
    """

    name: str
    reason: str

    @property
    def is_keras_backend(self) -> bool:
        """Whether Keras has such a backend; kerasdist may not support it."""
        return self.name in (*KNOWN, *_OTHERS)

    @property
    def problem(self) -> str | None:
        """Why this interpreter cannot use the backend, and what to do; None if it can."""
        installed = [name for name in KNOWN if is_installed(name)]
        if self.name in installed:
            return None
        there = f"Installed here: {', '.join(installed) or 'none of them'}."
        other = installed[0] if installed else "jax"
        if self.name not in KNOWN:
            near = difflib.get_close_matches(self.name.lower(), KNOWN, n=1)
            return (
                f"Expected Keras's backend to be one of {list(KNOWN)}. Received: "
                f"backend={self.name!r} ({self.reason}). {there} Set the variable "
                f"{VARIABLE}={near[0] if near else other}."
            )
        return (
            f"Expected Keras's backend to be installed. Received: backend={self.name!r} "
            f"({self.reason}), without the package. {there} Set {VARIABLE}={other}, or install "
            f"it: pip install 'kerasdist[{self.name}]'."
        )


def backend_choice(environ: Mapping[str, str] = os.environ) -> BackendChoice:
    """Returns Keras's choice: the variable, then its configuration file, then TensorFlow."""
    if environ.get(VARIABLE):
        return BackendChoice(environ[VARIABLE], VARIABLE)
    home = environ.get("KERAS_HOME")
    file = (Path(home) if home else Path.home() / ".keras") / "keras.json"
    try:
        chosen = json.loads(file.read_text(encoding="utf-8")).get("backend")
    except (OSError, ValueError, AttributeError):
        chosen = None
    if chosen:
        return BackendChoice(str(chosen), str(file))
    return BackendChoice("tensorflow", "Keras's default")


def is_installed(package: str) -> bool:
    """Returns whether a package, or a module of one, can be imported here."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def untested(backend: str) -> list[str]:
    """Returns those of Keras and a backend that are installed in a version not in `TESTED`."""
    found = {name: framework_version(name) for name in ("keras", backend)}
    return [
        f"{name} {version}"
        for name, version in found.items()
        if version is not None and version.partition("+")[0] not in TESTED.get(name, ())
    ]


def framework_version(name: str) -> str | None:
    """Returns the version of a framework that is installed, None if it is not."""
    return version_of(name) or version_of(f"{name}-cpu")  # TensorFlow's smaller build


def version_of(package: str) -> str | None:
    """Returns the version of a distribution that is installed, None if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
