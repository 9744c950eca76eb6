"""Ways of users' code to keep something in Python, and to read it behind a BatchNormalization.

There the replicas of a process meet, and another one has run meanwhile. Each way has a class for
what the model holds or shares: `start` makes it, `keep` gets a tensor, `read` returns it.
"""

import collections
import contextvars
import dataclasses
import functools
import itertools
import random
import sys
import types
import weakref

import numpy as np

from tests.conformance.lazy import keras, torch

# By their name: what equals one device, and what a first batch shows to be shared.
APART, SHARED = {}, {}


def apart(way):
    APART[way.__name__] = way
    return way


def shared(way):
    SHARED[way.__name__] = way
    return way


def model_of(ways, **options):
    """A model whose layer keeps its output in these ways, and adds them to what it normalizes."""

    class Keeping(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)
            self.normalization = keras.layers.BatchNormalization()
            self.parts = [type(one.__name__, (one, keras.layers.Layer), {})() for one in ways]
            for part in self.parts:
                part.start()

        def call(self, x, training=False):
            h = self.dense(x)
            for number, part in enumerate(self.parts):
                part.keep(h * (1.0 + 0.1 * number))
            normal = self.normalization(h, training=training)
            return normal + sum(part.read() for part in self.parts) / len(self.parts)

    model = keras.Sequential([keras.Input((3,)), Keeping(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", **options)
    return model


class Way:
    def start(self):
        """Makes what holds the tensor."""


class Box:
    def __init__(self, value=None):
        self.value = value


@dataclasses.dataclass(slots=True)
class Slots:
    value: object = None


# --------------------------------------------------------------------------- tensors


def holder(name, make, keep, read):
    """Makes a way whose layer has an object of a kind."""

    def start(self):
        self.kept = make()

    methods = {
        "start": start,
        "keep": lambda self, h: keep(self.kept, h),
        "read": lambda self: read(self.kept),
    }
    apart(type(name, (Way,), methods))


def fill(kept, h):
    kept.clear()
    kept.append(h)


def put(kept, h):
    kept["h"] = h


def box(kept, h):
    kept.value = h


holder("in_a_list", list, fill, lambda kept: kept[0])
holder("in_a_deque", collections.deque, fill, lambda kept: kept[0])
holder("in_a_bounded_deque", lambda: collections.deque(maxlen=1), fill, lambda kept: kept[-1])
holder("in_a_dict", dict, put, lambda kept: kept["h"])
holder("in_an_ordered_dict", collections.OrderedDict, put, lambda kept: kept.popitem()[1])
holder("in_a_set", set, lambda kept, h: kept.add(Box(h)), lambda kept: kept.pop().value)
holder("in_an_object", Box, box, lambda kept: kept.value)
holder("in_slots", Slots, box, lambda kept: kept.value)
holder("in_a_namespace", types.SimpleNamespace, box, lambda kept: kept.value)
holder(
    "nested",
    lambda: (Box([{"a": Box()}]), 1),
    lambda kept, h: box(kept[0].value[0]["a"], h),
    lambda kept: kept[0].value[0]["a"].value,
)
holder(
    "in_a_default_dict",
    lambda: Box(collections.defaultdict(list)),
    lambda kept, h: kept.value["h"].append(h),
    lambda kept: kept.value.pop("h")[0],
)
holder("in_a_user_dict", collections.UserDict, put, lambda kept: kept["h"])
holder(
    "in_a_memo_by_id",
    lambda: Box({}),
    lambda kept, h: (kept.value.clear(), kept.value.setdefault(id(h), h)),
    lambda kept: next(iter(kept.value.values())),
)


@apart
class AsAttribute(Way):
    def keep(self, h):
        self.h = h

    def read(self):
        return self.h


@apart
class ByProperty(Way):
    @property
    def kept(self):
        return self._own

    @kept.setter
    def kept(self, h):
        self._own = h

    def keep(self, h):
        self.kept = h

    def read(self):
        return self.kept


@apart
class ByWeakReference(Way):
    def keep(self, h):
        self.own = Box(h)
        self.reference = weakref.ref(self.own)

    def read(self):
        return self.reference().value


@apart
class InWeakDict(Way):
    def start(self):
        self.kept = weakref.WeakKeyDictionary()

    def keep(self, h):
        self.kept[self] = h

    def read(self):
        return self.kept[self]


@apart
class InListOfClass(Way):
    kept = []  # noqa: RUF012

    def keep(self, h):
        self.kept[:] = [h]

    def read(self):
        return self.kept[0]


@apart
class AsAttributeOfClass(Way):
    h = None

    def keep(self, h):
        type(self).h = h

    def read(self):
        return type(self).h


HELD, FEATURES, NAMED = {}, [], None
elsewhere = sys.modules["tests_elsewhere"] = types.ModuleType("tests_elsewhere")


@apart
class InGlobalDict(Way):
    def keep(self, h):
        HELD["h"] = h

    def read(self):
        return HELD["h"]


@apart
class InGlobalList(Way):
    def keep(self, h):
        FEATURES[:] = [h]

    def read(self):
        return FEATURES[0]


@apart
class AsGlobal(Way):
    def keep(self, h):
        global NAMED
        NAMED = h

    def read(self):
        return NAMED


@apart
class InModule(Way):
    def keep(self, h):
        elsewhere.h = h

    def read(self):
        return elsewhere.h


def remember(h):
    HELD["remembered"] = remember.last = h


remember.last = None


@apart
class ByHelper(Way):
    def keep(self, h):
        remember(h)

    def read(self):
        return HELD["remembered"] + remember.last


@apart
class InDefaultArgument(Way):
    def keep(self, h, kept=[None]):  # noqa: B006
        kept[0] = h

    def read(self):
        return type(self).keep.__defaults__[0][0]


@apart
class InClosure(Way):
    def start(self):
        last = None

        def keep(h):
            nonlocal last
            last = h

        self.remember, self.recall = keep, lambda: last

    def keep(self, h):
        self.remember(h)

    def read(self):
        return self.recall()


@apart
class InPartial(Way):
    def start(self):
        self.kept = functools.partial(put, {})

    def keep(self, h):
        self.kept(h)

    def read(self):
        return self.kept.args[0]["h"]


SCALE = contextvars.ContextVar("scale", default=1.0)


@apart
class InContext(Way):
    def keep(self, h):
        SCALE.set(h)

    def read(self):
        return SCALE.get()


# --------------------------------------------------------------------------- numbers


def counting(name, make, count, read, register=apart):
    def start(self):
        self.kept = make()

    methods = {
        "start": start,
        "keep": lambda self, h: count(self),
        "read": lambda self: 0.1 * read(self),
    }
    register(type(name, (Way,), methods))


def add(self):
    self.kept += 1


def add_first(self):
    self.kept[0] += 1


def add_to_counter(self):
    self.kept.value["a"] += 1


def draw(self):
    self.drawn = self.kept.random()


def take(self):
    self.drawn = next(self.kept)


counting("counted", int, add, lambda self: self.kept)
counting("counted_in_a_list", lambda: [0], add_first, lambda self: self.kept[0])
counting("counted_by_length", list, lambda self: self.kept.append("a"), lambda self: len(self.kept))
counting(
    "counted_in_a_counter",
    lambda: Box(collections.Counter()),
    add_to_counter,
    lambda self: self.kept.value["a"],
)
counting("seen", set, lambda self: self.kept.add(len(self.kept)), lambda self: len(self.kept))
counting(
    "counted_in_an_array",
    lambda: np.zeros(2, "float32"),
    add,
    lambda self: keras.ops.convert_to_tensor(self.kept.copy()),
)
counting("turned", bool, lambda self: setattr(self, "kept", not self.kept), lambda self: self.kept)
counting("later", int, add, lambda self: 5.0 if self.kept > 3 else 0.0)
counting("drawn_by_python", lambda: random.Random(0), draw, lambda self: self.drawn)
counting("drawn_by_numpy", lambda: np.random.default_rng(0), draw, lambda self: self.drawn)
legacy = functools.partial(np.random.RandomState, 0)
counting("drawn_by_old_numpy", legacy, draw, lambda self: self.drawn)

cycle = functools.partial(itertools.cycle, (1.0, 2.0, 4.0, 8.0, 16.0))
counting("by_a_cycle", cycle, take, lambda self: self.drawn, shared)
counting("by_a_count", itertools.count, take, lambda self: self.drawn, shared)
counting("by_a_generator", lambda: (i for i in range(99)), take, lambda self: self.drawn, shared)
large = functools.partial(np.zeros, 99_999, "float32")
counting("in_a_large_array", large, add, lambda self: float(self.kept[0]), shared)


@shared
class CountedByClass(Way):
    calls = 0

    def keep(self, h):
        type(self).calls += 1

    def read(self):
        return 0.1 * type(self).calls


CALLS = 0


@shared
class CountedGlobally(Way):
    def keep(self, h):
        global CALLS
        CALLS += 1

    def read(self):
        return 0.1 * CALLS


@shared
class CountedInClosure(Way):
    def start(self):
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def keep(self, h):
        self.calls = self.count()

    def read(self):
        return 0.1 * self.calls


@functools.cache
def hidden():
    return Box(0)


@shared
class CountedInCache(Way):
    def keep(self, h):
        hidden().value += 1

    def read(self):
        return 0.1 * hidden().value


def torch_modes():
    """Modes of a thread of PyTorch: how to enter each, and whether it is in force."""

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return 7 if function is torch.numel else function(*args, **kwargs or {})

    def hooked():
        one = torch.ones(1, requires_grad=True)
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(one**2, one)
        return bool(gradient != 2)

    hooks = functools.partial(torch.autograd.graph.saved_tensors_hooks, lambda x: x * 3, abs)
    return {
        "device": (lambda: torch.device("meta"), lambda: torch.zeros(1).is_meta),
        "autocast": (lambda: torch.autocast("cpu"), lambda: torch.is_autocast_enabled("cpu")),
        "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
        "anomalies": (torch.autograd.detect_anomaly, torch.is_anomaly_enabled),
        "functions": (Functions, lambda: torch.numel(torch.ones(2)) == 7),
        "saved tensors": (hooks, hooked),
    }
