"""Values as JSON and arrays, and back, in a process that has imported Keras (on JAX, say)."""

from tests.fresh import run_fresh

SCRIPT = """
import collections, json, pathlib, random, threading
import numpy as np
from kerasdist.callbacks.backup.encoding import Encoder, decode, digests, filled, numbered


def through(value, current=None):
    encoder, arrays = Encoder(), [None, None, None]
    form = json.loads(json.dumps(numbered(encoder.encode(value, "it"), arrays)))
    return decode(filled(form, arrays), current), encoder.lost


class Mine:
    def __init__(self):
        self.names, self.inner, self.lock = ["a"], collections.deque([1]), threading.Lock()


checks = {}
for name, value in {
    "plain": [None, True, 1, 2.5, "word"],
    "containers": {"t": (1, [2]), 3: {4}, "f": frozenset([5]), "d": collections.deque([6])},
    "bytes": b"\\x00\\xff",
    "not finite": [float("inf"), -0.0],
}.items():
    back, lost = through(value)
    checks[name] = repr(back) == repr(value) and not lost
array = np.arange(6.0).reshape(2, 3).T
back, _ = through(array)
checks["array"] = np.array_equal(back, array) and back.flags.writeable
back, _ = through(np.float32(0.1))
checks["scalar"] = type(back) is np.float32 and back == np.float32(0.1)
checks["words"] = through(np.array(["a", "bc"]))[0].tolist() == ["a", "bc"]

for kind in (np.random.default_rng, np.random.RandomState, random.Random):
    one, other = kind(1), kind(2)
    back, lost = through(one, other)
    draw = lambda generator: generator.random()
    checks[kind.__name__] = back is other and not lost and draw(one) == draw(other)

one, other = Mine(), Mine()
one.names.append("b")
one.inner.append(2)
names = other.names
back, lost = through(one, other)
checks["object in place"] = back is other and names == ["a", "b"] and list(other.inner) == [1, 2]
checks["lost"] = lost == {"it.lock": "lock"}
checks["code"] = through([print, np, Mine, pathlib.Path("a")], [1, 2, 3, 4]) == ([1, 2, 3, 4], {})
one.inner = one
checks["cycle"] = through(one, Mine())[1] == {"it.lock": "lock"}

same = [digests({"a": value}, []) for value in ([1, (2.0, "x")], [1, (2.0, "x")], [1, (2.0, "y")])]
checks["digest of plain"] = same[0] == same[1] != same[2]
same = [digests({"a": np.array(value)}, []) for value in ([1.0], [1.0], [2.0], [1])]
checks["digest of arrays"] = same[0] == same[1] and len({str(one) for one in same}) == 3
bad = [name for name, holds in checks.items() if not holds]
assert not bad, bad
print("DONE")
"""


def test_values_come_back():
    assert "DONE" in run_fresh(SCRIPT)
