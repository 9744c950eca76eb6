"""Finds the backend that Keras will choose, by Keras's own rules, without importing Keras."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import final

from kerasdist.errors import VersionError

VARIABLE = "KERAS_BACKEND"
"""The environment variable that chooses the backend."""

KNOWN = ("tensorflow", "jax", "torch")
"""The backends that kerasdist supports. Each backend's Python package has the same name."""

TESTED = {
    "keras": ("3.12.0", "3.15.1"),
    "tensorflow": ("2.18.0", "2.20.0", "2.21.0"),
    "jax": ("0.8.2", "0.10.2", "0.12.0.1"),
    "torch": ("2.9.0", "2.13.0", "2.14.1", "2.15.0"),
}
"""The releases that pass kerasdist's tests.

docs/versions.md lists the same releases, and nightly builds too.
"""

WANT_PROCESS_A_DEVICE = ("torch",)
"""The backends on which one process for each GPU is faster than one process for all GPUs."""

_OTHERS = ("numpy", "openvino")  # these backends of Keras are for inference only

_DISTRIBUTIONS = {
    "keras": ("keras", "keras-nightly"),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
}
"""For each package that PyPI offers under several names: these names."""


@final
@dataclass(frozen=True)
class BackendChoice:
    """The backend that Keras chooses when it is imported.

    Attributes:
        name: The backend's name, as the environment variable or Keras's configuration file spells
            it.
        reason: Where the choice comes from: ``"KERAS_BACKEND"``, a file, or ``"Keras's default"``.
    """

    name: str
    reason: str

    @property
    def is_keras_backend(self) -> bool:
        """Whether Keras has a backend of this name, even if kerasdist does not support it."""
        return self.name in (*KNOWN, *_OTHERS)

    @property
    def problem(self) -> str | None:
        """The error message for an unknown or missing backend; None if the backend can be used."""
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
    """Returns the backend that KERAS_BACKEND names, else the one in keras.json, else TensorFlow."""
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
    """Returns whether this interpreter can import a package or module."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def untested(backend: str) -> list[str]:
    """Returns the name and version of Keras, and of the framework, if that version is untested.

    Each entry is a text such as ``keras 3.11.0``. The list is empty if both versions are tested.
    """
    found = {name: framework_version(name) for name in ("keras", backend)}
    return [
        f"{name} {version}"
        for name, version in found.items()
        if version is not None and version.partition("+")[0] not in TESTED.get(name, ())
    ]


def framework_version(name: str) -> str | None:
    """Returns the version of an imported or installed framework, None if it is neither."""
    imported = getattr(sys.modules.get(name), "__version__", None)
    if imported is not None:
        return str(imported)
    return next((one.version for one in distributions(name).values()), None)


def distributions(package: str) -> dict[str, Distribution]:
    """Returns a package's installed distributions by name; the first is the one Python imports."""
    found: list[tuple[int, str, Distribution]] = []
    for name in _DISTRIBUTIONS.get(package, (package,)):
        try:
            one = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        folder = folder_of(one)
        places = [index for index, each in enumerate(sys.path) if Path(each).resolve() == folder]
        found.append((min(places, default=len(sys.path)), name, one))
    return {name: one for _, name, one in sorted(found, key=lambda each: each[0])}


def folder_of(distribution: Distribution) -> Path:
    """Returns the folder into which a distribution is installed."""
    return Path(str(distribution.locate_file(""))).resolve()


@functools.cache
def floors() -> dict[str, str]:
    """Returns the lowest version of Keras, and of each framework, that kerasdist's package allows.

    Returns an empty dict if kerasdist runs from a checkout that is not installed.
    """
    from packaging.requirements import Requirement  # imported here, since this import takes 10 ms

    declared = importlib.metadata.requires("kerasdist") if version_of("kerasdist") else None
    return {
        one.name: each.version
        for one in map(Requirement, declared or ())
        for each in one.specifier
        if one.name in ("keras", *KNOWN) and each.operator == ">="
    }


def too_old(package: str) -> str | None:
    """Returns why an installed package is too old, and what to do; None if it is not too old."""
    from packaging.version import InvalidVersion, Version

    floor, version = floors().get(package), framework_version(package)
    if floor is None or version is None:
        return None
    try:
        # Builds in NVIDIA's containers have versions such as 2.9.0a0, which count as 2.9.0.
        if Version(Version(version).base_version) >= Version(floor):
            return None
    except InvalidVersion:  # a user's own build may have any text as its version
        return None
    return (
        f"Expected {package}>={floor}, the lowest version that kerasdist works with. Received: "
        f"{package}={version}. Install it: {install_command(package, f'>={floor}')}."
    )


def require_supported() -> None:
    """Raises a `VersionError` if Keras, or the framework of the chosen backend, is too old."""
    for package in ("keras", backend_choice().name):
        if (problem := too_old(package)) is not None:
            raise VersionError(problem)


def install_command(package: str, versions: str = "") -> str:
    """Returns the command that installs a package, with a specifier of versions such as ``>=3.12``.

    If a nightly build is installed, the command first uninstalls it, because pip would leave the
    nightly's files beside the files of the release.
    """
    here = [*distributions(package)] or [package]
    if any("nightly" in name for name in here):
        return (
            f"pip uninstall --yes {' '.join(here)} && pip install {shlex.quote(package + versions)}"
        )
    return f"pip install {shlex.quote(here[0] + versions)}"


def version_of(package: str) -> str | None:
    """Returns the version of an installed distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
