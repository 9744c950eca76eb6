"""What `run` hands to replicas, and what it makes of what they return."""

import collections
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.conformance.lazy import kd, ops
from tests.facade.case import case
from tests.facade.lab import numbered

Point = collections.namedtuple("Point", ["x", "y"])


@case(replicas=(1, 2, 3, 4))
def each_replica_gets_its_component(lab, strategy):
    """`run` gives each replica its component of a distributed value, and all other arguments."""
    data = {"a": numbered(strategy), "b": [np.float32(10.0), (numbered(strategy), None)]}

    def step(nest, *, factor, word):
        lab.check(word == "text", "plain objects arrive as they are")
        lab.check(nest["b"][1][1] is None, "None arrives as None")
        return factor * (nest["a"] + nest["b"][0] + nest["b"][1][0])

    result = strategy.run(step, args=(data,), kwargs={"factor": 2.0, "word": "text"})
    expected = [2.0 * (10 + 2 * index) for index in range(lab.replicas)]
    lab.equal(expected, lab.components(result, strategy))


@case(replicas=(2, 3))
def nests_come_back_with_a_distributed_value_at_each_leaf(lab, strategy):
    """A step may return nested dicts, lists and named tuples; the result has the same form."""

    def step(x):
        ordered = collections.OrderedDict(z=x * 4, a=x)
        default = collections.defaultdict(list, one=x * 5)
        found = {"point": Point(x, x + 1), "list": [x * 2, (x * 3,)], "dict": ordered}
        # torch's functions return named tuples of a kind of their own.
        return found | {"none": None, "default": default, "top": ops.top_k(x[None], 1)}

    result = strategy.run(step, args=(numbered(strategy),))
    lab.equal({"point", "list", "none", "dict", "default", "top"}, set(result))
    lab.check(isinstance(result["dict"], collections.OrderedDict), "an OrderedDict")
    lab.equal(["z", "a"], list(result["dict"]))
    lab.check(isinstance(result["point"], Point), f"a Point, received {result['point']!r}")
    lab.check(isinstance(result["list"][1], tuple), "a tuple in a list")
    lab.check(result["none"] is None, "None is equal in all replicas")
    for leaf, factor, more in (
        (result["point"].x, 1, 0),
        (result["point"].y, 1, 1),
        (result["list"][0], 2, 0),
        (result["list"][1][0], 3, 0),
        (result["dict"]["z"], 4, 0),
        (result["default"]["one"], 5, 0),
        (result["top"][0], 1, 0),
    ):
        lab.check(isinstance(leaf, kd.PerReplica), f"a PerReplica, received {type(leaf)}")
        expected = [index * factor + more for index in range(lab.replicas)]
        lab.equal(expected, [one.reshape(()) for one in lab.components(leaf, strategy)])
    given = collections.defaultdict(list, x=numbered(strategy))
    step = lambda given, shape: ops.reshape(given["x"], shape)  # noqa: E731
    found = strategy.run(step, args=(given, ops.ones((1, 1)).shape))
    lab.equal([[[float(i)]] for i in range(lab.replicas)], lab.components(found, strategy))


@case
def plain_results_stay_plain(lab, strategy):
    """`run` returns a text or number once; its results can be arguments of the next `run`."""
    lab.equal("text", strategy.run(lambda: "text"))
    lab.equal({3}, {int(one) for one in lab.components(strategy.run(lambda: 3), strategy)})
    lab.check(strategy.run(lambda: None) is None, "None comes back")
    value = numbered(strategy)
    for _ in range(3):
        value = strategy.run(lambda x, one: x * 2.0 + one, args=[value, 1.0])
    lab.equal([7.0, 15.0], lab.components(value, strategy))


@case(replicas=(1, 2, 3))
def ragged_components(lab, strategy):
    """Components may differ in size, and a replica may have no rows."""
    value = numbered(strategy, lambda index: np.arange(lab.replicas - 1 - index, dtype="float32"))
    total = lambda x: kd.get_replica_context().all_reduce("SUM", x)  # noqa: E731
    rows, sums, all_sums = strategy.run(
        lambda x: (x + 1.0, ops.sum(x), total(ops.sum(x))), args=(value,)
    )
    expected = [np.arange(lab.replicas - 1 - i, dtype="float32") + 1 for i in range(lab.replicas)]
    each = [float(np.sum(one - 1)) for one in expected]
    lab.equal(expected, lab.components(rows, strategy))
    lab.equal(each, lab.components(sums, strategy))
    lab.equal([sum(each)] * lab.replicas, lab.components(all_sums, strategy))
    counts = strategy.run(lambda x: {"n": ops.shape(x)[0]}, args=(value,))
    if lab.replicas > 1:
        lab.equal(list(map(len, expected)), lab.components(counts["n"], strategy))


@case
def dtypes_are_kept(lab, strategy):
    """Values keep their dtype in `run`."""
    for dtype in ("float32", "float16", "int32", "int8", "uint8", "bool"):
        value = numbered(strategy, lambda index, dtype=dtype: np.array([index, 1], dtype))
        result = strategy.run(lambda x: ops.reshape(x, (2, 1)), args=(value,))
        expected = [np.array([[index], [1]], dtype) for index in range(2)]
        lab.equal(expected, lab.components(result, strategy))


@case
def two_threads_use_one_strategy(lab, strategy):
    """Two threads may use one strategy at once, though a third thread has made it."""

    def step(x):
        return kd.get_replica_context().all_reduce("SUM", x)

    def work(number):
        found = []
        for turn in range(4):
            value = numbered(strategy, lambda i, t=turn: np.float32(100 * number + 10 * t + i))
            result = strategy.run(step, args=(value,))
            found.append([float(x) for x in lab.components(result, strategy)])
        return found

    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(work, number) for number in (0, 1)]
    for number, one in enumerate(ended):
        expected = [[200.0 * number + 20 * turn + 1] * 2 for turn in range(4)]
        lab.equal(expected, one.result())
