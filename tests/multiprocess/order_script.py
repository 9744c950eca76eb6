"""One worker of a job that records its collectives, case by case, in one process.

python -m tests.multiprocess.order_script; the environment says which worker, and the backend.
Prints a line a case, and ends with one that fails.
"""

import contextlib
import itertools
import os
import re
import time

import kerasdist as kd

# Groups of weights, and buckets of gradients, of a layer each.
BY_LAYER = kd.CommunicationOptions(bytes_per_pack=64)
STRATEGY = kd.MultiWorkerMirroredStrategy(communication_options=BY_LAYER)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from kerasdist.job.collectives import STEPS, CollectiveLog  # noqa: E402
from tests.conformance.models import dense, regression, stack  # noqa: E402
from tests.multiprocess.loops import torch_launches  # noqa: E402

BACKEND = os.environ["KERAS_BACKEND"]
JOB = STRATEGY.replica_set.job
RANK, WORKERS = JOB.rank, JOB.num_workers
ROWS, BATCH = 20, 8  # two steps of eight rows and one of four
X, Y = regression(ROWS)
# How long a worker is late: the others go on as far as they come without it.
LATE = 0.02
CASES = []


def case(*backends):
    def add(function):
        if BACKEND in backends:
            CASES.append(function)
        return function

    return add


ALL = ("tensorflow", "jax", "torch")


def normalized(optimizer):
    """Its backward pass has collectives of its own."""
    layers = keras.layers
    hidden = layers.Dense(6, use_bias=False)  # a bias would have a gradient of rounding errors
    return stack([hidden, layers.BatchNormalization(), layers.Dense(1)], optimizer, metrics=["mae"])


# On torch the sums of `dense` start within the backward pass, those of `normalized` after it.
MODELS = (dense, normalized) if BACKEND == "torch" else (normalized,)


class Training:
    def __init__(self, make, strategy=None):
        keras.utils.set_random_seed(5)
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            self.model = make(keras.optimizers.Adam(0.05))
            self.model.optimizer.build(self.model.trainable_variables)
        self.variables = [*self.model.variables, *self.model.optimizer.variables]
        self.start = self.values()

    def values(self):
        return [np.array(keras.ops.convert_to_numpy(one)) for one in self.variables]

    def run(self):
        """Returns all that a call of `fit` gives, and how many collectives it has issued."""
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)
        before = recorded()
        history = self.model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0).history
        issued = recorded() - before
        return [*map(np.array, history.values()), *self.values()], issued


def recorded():
    return JOB.collectives.taken + len(JOB.collectives._entries)


def same(found, expected, tolerance=2e-5):  # sums in another order
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@contextlib.contextmanager
def before_each(act):
    """Calls a function with the number of each collective, from 0, just before it starts."""
    original, numbers = CollectiveLog.add, iter(range(10**9))

    def add(log, entry):
        act(next(numbers))
        original(log, entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CollectiveLog, "add", add)
        yield


def strategies():
    yield STRATEGY
    for state in {"torch": ("optimizer", "full"), "jax": ("full",)}.get(BACKEND, ()):
        yield kd.MultiWorkerMirroredStrategy(
            sharding=kd.Sharding(state, min_size=1), communication_options=BY_LAYER
        )


@case(*ALL)
def late_at_each_point():
    """Workers agree, in time or late, for each `sharding`; the numbers are one device's.

    Each worker is late before each collective, of which the other has then started the next.
    """
    for make in MODELS:
        trainings = [Training(make, strategy) for strategy in strategies()]
        runs = [training.run() for training in trainings]
        plain, none = Training(make).run()
        assert none == 0, none
        for training, (first, _) in zip(trainings, runs, strict=True):
            same(first, plain)
            expected, issued = training.run()  # without the exchanges of a first call
            assert issued >= 3, issued  # each step has a collective, or a program
            for rank, parity in itertools.product(range(WORKERS), range(2)):

                def late(number, rank=rank, parity=parity):
                    if rank == RANK and number % 2 == parity:
                        time.sleep(LATE)

                with before_each(late):
                    found, again = training.run()
                assert again == issued, (again, issued)
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_array_equal(one, other, err_msg=f"{rank} late at {parity}")


def refused(step):
    """Returns what is said while workers take a step again and again."""

    def again():
        for _ in range(STEPS):
            step()

    with pytest.raises(kd.errors.DisagreementError) as raised:
        again()
    return str(raised.value)


def two_sums(value, swapped):
    replica = kd.get_replica_context()
    if swapped:
        other = replica.all_reduce("SUM", 2 * value)
        return replica.all_reduce("SUM", value), other
    one = replica.all_reduce("SUM", value)
    return one, replica.all_reduce("SUM", 2 * value)


@case("tensorflow", "torch")
def another_order_is_named():
    """Two sums of one shape, the other way round on one worker: wrong numbers, and no hang."""
    value = keras.ops.ones((3,))
    JOB.compare_collectives("the case")
    STRATEGY.run(lambda: two_sums(value, swapped=False))
    before = recorded()
    first = two_sums.__code__.co_firstlineno
    said = refused(lambda: STRATEGY.run(lambda: two_sums(value, swapped=RANK == 1)))
    assert f"Received: collective {before + 1}='all_reduce" in said, said
    odd, even = (f"order_script.py:{first + line}" for line in (3, 5))
    one, other = said.split(" on worker 1, ")
    assert odd in one, said
    assert even in other, said
    assert other.partition("on worker 0")[1], said
    for _ in range(STEPS):  # and go on
        STRATEGY.run(lambda: two_sums(value, swapped=False))


@case("jax")
def another_order_of_programs_is_named():
    """Two programs with collectives of one shape, the other way round on one worker."""
    value = np.ones((3,), "float32")

    def summed(factor):
        def step(value):
            return kd.get_replica_context().all_reduce("SUM", factor * value)

        return lambda: STRATEGY.run(step, args=(value,))

    one, other = summed(2.0), summed(3.0)
    one()
    other()
    JOB.compare_collectives("the case")

    def both():
        for program in (other, one) if RANK else (one, other):
            program()

    said = refused(both)
    assert re.search("Received: collective .*='program .* on worker 1, 'program", said), said
    one()
    other()


@case("torch")
def each_collective_is_recorded():
    """All that torch launches, and nothing else."""
    for strategy in strategies():
        training = Training(normalized, strategy)
        before = recorded()
        with torch_launches() as launched:
            training.run()
        assert len(launched) == recorded() - before, launched


def main():
    for one in CASES:
        one()
        print("passed", one.__name__, flush=True)
    print("passed all", flush=True)


if __name__ == "__main__":
    main()
