"""Internals of Keras and of frameworks: functions, classes and attributes that are not public.

A release may move or remove any of them. Therefore each internal that kerasdist uses is declared
once, as an `Internal`: internals of Keras in ``keras_compat/internals.py``, internals of a
framework in ``backends/<framework>/internals.py``. If an internal is missing, only the feature that
needs it raises a `VersionError`, when the feature is used; everything else works.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, Final, final

from packaging.version import Version

from kerasdist.core.backend_choice import TESTED, framework_version, install_command
from kerasdist.errors import VersionError

EVERY_VERSION: Final = "all"
REFUSED: Final = "refused"

_GONE: Final = object()


# Compiled steps read a dictionary whose keys are instances of this class. The class is not frozen,
# because torch's compiler would hash instances of a frozen dataclass by their fields.
@final
@dataclass(eq=False)
class Internal:
    """A part of Keras or of a framework that is not public: a function, a class, an attribute.

    Attributes:
        spellings: For each path that the internal has or had, the versions with this path. The
            newest path comes first. A path is ``"module:Owner.name"`` or ``"module:name"``. The
            last name may also be an attribute that methods of the class `Owner` set, or a text in
            the code of the function `Owner`. Versions are `EVERY_VERSION`, ``"3.12 to 3.15"``, or
            ``"3.16"`` for "from 3.16 on". In versions older than all of these, kerasdist does not
            need the internal.
        feature: The feature that needs this internal, as error messages name it.
        without: What happens if the internal is missing, as ``kerasdist doctor`` prints it.
        backends: The backends on which kerasdist uses the internal; empty for all backends.
        in_each_fit: Whether every `fit` of a strategy's model needs the internal.
        otherwise: What `value` returns if the internal is missing. By default `value` raises an
            error in that case.
    """

    spellings: Mapping[str, str]
    feature: str
    without: str = REFUSED
    backends: tuple[str, ...] = ()
    in_each_fit: bool = False
    otherwise: Any = _GONE

    @property
    def package(self) -> str:
        """The internal's package: ``"keras"``, ``"tensorflow"``, ``"jax"`` or ``"torch"``."""
        return next(iter(self.spellings)).partition(":")[0].partition(".")[0]

    @functools.cached_property
    def attribute(self) -> str:
        """The attribute's name in the installed version."""
        path = self.path or next(iter(self.spellings))
        return path.rpartition(":")[2].rpartition(".")[2]

    @functools.cached_property
    def path(self) -> str | None:
        """The path in the installed version; None if that version lacks the internal."""
        return next((path for path in self.spellings if _has(path)), None)

    def is_there(self) -> bool:
        """Returns whether the installed version has this internal."""
        return self.path is not None

    def is_gone(self) -> bool:
        """Returns whether the internal is missing in an installed version that should have it."""
        installed = framework_version(self.package)
        if installed is None or self.is_there():
            return False
        first = list(self.spellings.values())[-1].partition(" ")[0]
        return first == EVERY_VERSION or Version(installed) >= Version(f"{first}.dev0")

    def require(self) -> None:
        """Raises a `VersionError` if the installed version does not have this internal."""
        if not self.is_there():
            raise self.missing()

    @functools.cached_property
    def place(self) -> tuple[Any, str]:
        """The module, class or function that has this internal, and the internal's name there.

        Raises:
            VersionError: If the installed version does not have this internal.
        """
        if self.path is None:
            raise self.missing()
        return place_at(self.path)

    @functools.cached_property
    def value(self) -> Any:
        """The function, class, constant or text that this internal names; `otherwise` if missing.

        Raises:
            VersionError: If the installed version does not have this internal, and the internal was
                declared without `otherwise`.
        """
        if self.path is None and self.otherwise is not _GONE:
            return self.otherwise
        owner, name = self.place
        return getattr(owner, name, name)

    def of(self, instance: object) -> Any:
        """Returns an attribute of an object: the attribute that this internal names.

        Raises:
            VersionError: If the object has no such attribute.
        """
        value = getattr(instance, self.attribute, _GONE)
        if value is _GONE:
            raise self.missing()
        return value

    def set(self, instance: object, value: object) -> None:
        """Sets the attribute that `of` returns; raises a `VersionError` if the object has none."""
        self.of(instance)
        setattr(instance, self.attribute, value)

    def missing(self) -> VersionError:
        """Returns the error that says which feature needs this missing internal."""
        name, version = _spoken(self.package), framework_version(self.package)
        tested = install_command(self.package, f"=={TESTED[self.package][-1]}")
        return VersionError(
            f"Expected {name} to have {next(iter(self.spellings))}, which kerasdist needs for "
            f"{self.feature}. Received: {self.package}={version}, without it. Install a newer "
            f"kerasdist (pip install --upgrade kerasdist), or a version of {name} that was tested: "
            f"{tested}. `kerasdist doctor` lists what else is gone."
        )


def internal(
    path: str,
    feature: str,
    without: str = REFUSED,
    backends: tuple[str, ...] = (),
    *,
    in_each_fit: bool = False,
    otherwise: Any = _GONE,
) -> Internal:
    """Returns an internal that has the same path in all supported versions."""
    return Internal({path: EVERY_VERSION}, feature, without, backends, in_each_fit, otherwise)


def internals_of(table: ModuleType) -> dict[str, Internal]:
    """Returns the internals that a module declares; the keys are the names of its variables."""
    return {name: value for name, value in vars(table).items() if isinstance(value, Internal)}


def require_all(table: ModuleType, feature: str) -> None:
    """Raises a `VersionError` if an internal that a feature needs is missing."""
    for internal in internals_of(table).values():
        if internal.feature == feature:
            internal.require()


@functools.cache
def with_base(kind: type[Any], base: type[Any]) -> type[Any]:
    """Returns a subclass of `kind` and of `base`, an internal class of Keras or a framework.

    With this function, a module can define `kind` when the module is imported, and look up the
    internal class `base` only when it is needed. If `kind` already derives from `base`, `kind`
    itself is returned.
    """
    if issubclass(kind, base):
        return kind
    body = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, base), body)


def _spoken(package: str) -> str:
    return {"keras": "Keras", "tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}[package]


def place_at(path: str) -> tuple[Any, str]:
    """Returns the module, class or function that contains a path's last name, and that name.

    Raises AttributeError or ImportError if there is no such module, class or function.
    """
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def value_at(path: str) -> Any:
    """Returns the object at a path; raises AttributeError or ImportError if there is none."""
    return getattr(*place_at(path))


def _has(path: str) -> bool:
    try:
        owner, name = place_at(path)
    except (AttributeError, ImportError):
        return False
    return hasattr(owner, name) or name in _names_used_in(owner)


@functools.cache
def _names_used_in(owner: Any) -> frozenset[str]:
    """Returns the names and strings in the code of a function, or of a class's methods."""
    parents = getattr(owner, "__mro__", ())
    functions = [owner, *(each for parent in parents for each in vars(parent).values())]
    codes = [code for function in functions for code in _codes(function)]
    texts = (text for code in codes for text in code.co_consts if isinstance(text, str))
    return frozenset([*(name for code in codes for name in code.co_names), *texts])


def undecorated(member: Any) -> Any:
    """Returns the function inside of a property, static method or class method.

    Returns any other `member` itself.
    """
    return getattr(member, "fget", getattr(member, "__func__", member))


def _codes(member: object) -> Iterator[CodeType]:
    return codes_in(getattr(inspect.unwrap(undecorated(member)), "__code__", None))


def codes_in(value: object) -> Iterator[CodeType]:
    """Yields a code object and the code objects inside of it; yields nothing for other values."""
    if isinstance(value, CodeType):
        yield value
        for one in value.co_consts:
            yield from codes_in(one)
