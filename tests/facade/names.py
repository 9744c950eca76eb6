"""Compares the modules, classes and functions of tf.distribute with kerasdist's.

The list is made from the installed TensorFlow: `dir` of each module and class, `inspect.signature`
of what can be called. A new TensorFlow shows what is new.
"""

import dataclasses
import enum
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kerasdist.core import earlier_names
from tests.conformance.lazy import kd, tf

# TensorFlow's module; kerasdist's module with its names; the name of that in the tables.
MODULES = {
    "tf.distribute": ("kd", "kerasdist"),
    "tf.distribute.experimental": ("kd.experimental", "kerasdist.experimental"),
    "tf.distribute.cluster_resolver": ("kd.cluster_resolver", "kerasdist.cluster"),
    "tf.tpu": ("kd.tpu", "kerasdist.tpu"),
    "tf.tpu.experimental": ("kd.tpu", "kerasdist.tpu"),
    "tf.compat.v1.distribute": ("kd", "kerasdist"),
    "tf.compat.v1.distribute.experimental": ("kd.experimental", "kerasdist.experimental"),
    "tf.compat.v1.distribute.cluster_resolver": ("kd.cluster_resolver", "kerasdist.cluster"),
}
# These names are modules; their members are compared separately.
INNER = ("experimental", "cluster_resolver")
# Classes that no script constructs: the arguments of their constructors are not looked at.
MADE_BY_US = ("Strategy", "StrategyExtended", "DistributedDataset", "DistributedIterator",
              "DistributedValues", "ClusterResolver")  # fmt: skip
# Arguments that TensorFlow's signatures do not name, or that are read in another order.
SAID = {
    "CommunicationOptions": ("bytes_per_pack", "timeout_seconds", "implementation"),
    "CollectiveHints": ("bytes_per_pack", "timeout_seconds"),
}
# Arguments that `**earlier` takes, by their new names; and the first one of `tf.function`.
TAKEN = {"device_assignment", "communication", "func"}
# The attributes of Python's own classes.
OF_PYTHON = set(dir(tuple)) | set(dir(int)) | set(dir(enum.Enum)) | {"name", "value"}


@dataclass(frozen=True)
class Name:
    place: str  # such as tf.distribute.Strategy
    name: str
    # None: it is here under this name, and takes all arguments that TensorFlow's takes.
    advice: str | None = None
    is_missing: bool = False


def listed() -> list[Name]:
    """Returns every public name of TensorFlow's modules and classes, and its counterpart here."""
    found = [one for module in MODULES for one in _of_module(module)]
    connect = tf.config.experimental_connect_to_cluster
    found.extend(_arguments("tf.config.connect_to_cluster", connect, kd.connect_to_cluster))
    return [*found, *_arguments("tf.function", tf.function, kd.function)]


def _of_module(module: str) -> Iterator[Name]:
    home, of = MODULES[module]
    theirs, ours = _at(tf, module), _at(kd, home)
    for name in _public(theirs):
        if name in INNER and inspect.ismodule(getattr(theirs, name)):
            continue
        yield from _compared(module, of, ours, name)
        their, our = getattr(theirs, name), getattr(ours, name, None)
        if our is None:
            continue
        yield from _arguments(f"{module}.{name}", their, our)
        if inspect.isclass(their):
            yield from _of_class(f"{module}.{name}", their, our)


def _of_class(place: str, theirs: type, ours: type) -> Iterator[Name]:
    instance = _instance(ours)
    of = next((one.__name__ for one in ours.__mro__ if one.__name__ in TABLES), ours.__name__)
    fields = (
        {one.name for one in dataclasses.fields(ours)} if dataclasses.is_dataclass(ours) else ()
    )
    for name in _public(theirs):
        if name in OF_PYTHON - set(dir(ours)):
            continue
        if name in {*dir(ours), *vars(instance), *fields}:
            yield Name(place, name)
            if callable(getattr(ours, name, None)) and name not in OF_PYTHON:
                yield from _arguments(f"{place}.{name}", getattr(theirs, name), getattr(ours, name))
        else:
            yield from _compared(place, of, instance, name)


TABLES = earlier_names.RENAMED.keys() | earlier_names.ADVICE.keys()


def _instance(kind: Any) -> Any:
    """Returns an instance, made without the constructor if possible: only its class matters."""
    if issubclass(kind, enum.Enum):
        return next(iter(kind))
    one_core = kd.DeviceAssignment.SINGLE_CORE
    known = {kd.DeviceAssignment: one_core, kd.tpu.Topology: one_core.topology}
    whole = (one for one in (kind, *kind.__subclasses__()) if not inspect.isabstract(one))
    return known[kind] if kind in known else object.__new__(next(whole))


def _compared(place: str, of: str, owner: Any, name: str) -> Iterator[Name]:
    new = earlier_names.look_up(name, earlier_names.RENAMED, of)
    advice = earlier_names.look_up(name, earlier_names.ADVICE, of)
    if new is not None:
        said = "the same" if not new or new.endswith(".") else f"`{new}`"
        yield Name(place, name, None if said == "the same" else said)
    elif advice is not None:
        yield Name(place, name, advice)
    else:
        yield Name(place, name, is_missing=not hasattr(owner, name))


def _arguments(place: str, theirs: Any, ours: Any) -> Iterator[Name]:
    name = place.rpartition(".")[2]
    if name in MADE_BY_US or not (callable(theirs) and callable(ours)):
        return
    expected = SAID.get(name) or _parameters(theirs)
    found = _parameters(ours)
    of_class = {"MirroredStrategy": "a strategy", "DeviceAssignment": "DeviceAssignment.build"}
    refused_by = [f"kerasdist.{name}", name, of_class.get(name, name), "a strategy"]
    refused_by += ["a resolver"] if name.endswith("Resolver") else []
    refused_by += ["TPUClusterResolver"] if name == "connect" else []
    for argument in expected:
        if argument in found or (argument in TAKEN and {"earlier", "fn"} & {*found}):
            continue
        advice = next(filter(None, (
            earlier_names.look_up(argument, earlier_names.ARGUMENTS, of) for of in refused_by
        )), None)  # fmt: skip
        yield Name(place, f"{argument}=", advice, is_missing=advice is None)


def _parameters(function: Any) -> list[str]:
    try:
        found = inspect.signature(function, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # of Python's own classes
        return []
    return [name for name in found if name not in ("self", "args", "kwargs")]


def _public(owner: Any) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]


def _at(root: Any, path: str) -> Any:
    for part in path.split(".")[1:]:
        root = getattr(root, part)
    return root
