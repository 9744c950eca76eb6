"""`offload="optimizer"`: the host holds the optimizer's variables, with and without sharding."""

import contextlib
from unittest import mock

from kerasdist.core import sharding
from tests.conformance.actions import fit, predict
from tests.conformance.cases_sharding import even
from tests.conformance.compare import ADAPTIVE
from tests.conformance.lab import optimizer_values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression
from tests.conformance.registry import case
from tests.multiprocess.loops import same_loop

TOPIC = "offload"
_ON_TENSORFLOW = ("UnsupportedError", "Expected offload=None.*Received: .*KERAS_BACKEND=jax")
_UNSHARDED = ("UnsupportedError", "Expected sharding=None.*Received: .*KERAS_BACKEND=jax")
REFUSED = {"tensorflow": _ON_TENSORFLOW}
_NONE = ("UnsupportedError", "Expected one device per process.*Received: .*kerasdist run")


@contextlib.contextmanager
def of_all_sizes():
    """No variable is too small for the host, and each weight is a group of its own."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sharding, "DEFAULT_MIN_SIZE", 1))
        if keras.backend.backend() == "jax":
            from kerasdist.backends.jax.mesh import host_memory

            stack.enter_context(mock.patch.object(host_memory, "GROUP_BYTES", 1))
        elif keras.backend.backend() == "torch":
            from kerasdist.backends.torch.fit import updates

            stack.enter_context(mock.patch.object(updates, "_BYTES_ON_CPU", 1))
        yield


def is_on_host(variable):
    if keras.backend.backend() == "jax":
        return variable._value.sharding.memory_kind == "pinned_host"
    from kerasdist.backends.torch.state import host_memory

    return host_memory.is_on_host(variable)


def where(variables):
    """Whether the host holds variables: of weights, and the others."""
    return {is_on_host(one) for one in variables if one.shape}, {
        is_on_host(one) for one in variables if not one.shape
    }


@case(TOPIC, replicas=(1, 2, 3), refused=REFUSED)
def as_one_device(lab):
    """`fit`, `predict`, files and assignments are those of one device; only slots leave it."""
    x, y = regression(9, outputs=4)
    with of_all_sizes():
        strategy = lab.strategy(offload="optimizer")
        actions = fit(x, y, batch_size=4, epochs=2), predict(x)
        model = lab.same(even, *actions, strategy=strategy, tolerance=ADAPTIVE, plain_key="slots")
        slots = model.optimizer.variables
        lab.equal(({True}, {False}), where(slots))
        lab.equal({False}, {is_on_host(one) for one in model.weights})
        rows = kd.describe_layout(model).rows
        lab.equal(
            12, sum(layout == "whole, on the host" and not held for *_, layout, _, held in rows)
        )
        one = next(each for each in slots if each.shape)
        one.assign(one + 1.0)
        lab.equal(({True}, {False}), where(slots))
        with lab.folder() as folder:
            model.save(folder / "m.keras")
            lab.equal(
                optimizer_values(model),
                optimizer_values(keras.models.load_model(folder / "m.keras")),
            )
        model.fit(x, y, verbose=0)
        lab.equal(({True}, {False}), where(slots))


OPTIMIZERS = {
    "clipped": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "averaged": lambda: keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
}


@case(TOPIC, replicas=(2,), refused=REFUSED)
def of_all_kinds(lab):
    """Clipped, accumulated, averaged, scaled gradients; steps that run by operations."""
    x, y = regression(9, outputs=4)
    with of_all_sizes():
        for name, make in OPTIMIZERS.items():

            def build(make=make, name=name):
                model = even()
                ways = {"nadam": {"run_eagerly": True}}
                if keras.backend.backend() == "jax":  # torch takes one by one
                    ways["clipped"] = {"steps_per_execution": 3}
                model.compile(make(), "mse", **ways.get(name, {}))
                return model

            model = lab.same(
                build,
                fit(x, y, batch_size=4),
                strategy=lab.strategy(offload="optimizer"),
                tolerance=ADAPTIVE,
                plain_key=name,
            )
            lab.check(any(map(is_on_host, model.optimizer.variables)), name)


@case(TOPIC, replicas=(2, 3), refused={"tensorflow": _UNSHARDED, "torch": _NONE})
def sharded(lab):
    """With shards: the host holds each device's own."""
    x, y = regression(9, outputs=4)
    for state in ("optimizer", "full"):
        with of_all_sizes():
            strategy = lab.strategy(sharding=kd.Sharding(state, min_size=1), offload="optimizer")
            model = lab.same(
                even,
                fit(x, y, batch_size=4, epochs=2),
                strategy=strategy,
                tolerance=ADAPTIVE,
                plain_key="divided by all",
            )
        slot = model.optimizer.variables[2]
        lab.equal(({True}, {False}), where(model.optimizer.variables))
        lab.check(
            lab.replicas == 3 or not slot._value.is_fully_replicated, str(slot._value.sharding)
        )


@case(TOPIC, replicas=(2,), refused=REFUSED)
def custom_loop(lab):
    """A custom loop reads and writes them as others; between its steps the host holds them."""
    batches = [regression(8, outputs=4, seed=seed) for seed in range(2)]
    with of_all_sizes():
        strategy = lab.strategy(offload="optimizer")
        model = same_loop(lab, even, batches, strategy, tolerance=ADAPTIVE)
    lab.check(any(map(is_on_host, model.optimizer.variables)), "the device holds all")


@case(TOPIC, replicas=(2,))
def wrong_values(lab):
    """Another value is refused, with what was received."""
    with lab.raises(ValueError, r"Expected offload to be one of.*Received: offload='weights'"):
        lab.strategy(offload="weights")
