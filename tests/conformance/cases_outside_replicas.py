"""What a scope runs outside of replicas: losses and optimizers do what plain Keras does."""

import contextlib

import numpy as np

from tests.conformance.compare import ADAPTIVE
from tests.conformance.lazy import kd, keras, tf
from tests.conformance.models import dense, largest_error, regression, stack
from tests.conformance.registry import case
from tests.environment import everything

N, BATCH = 11, 4
X, Y = regression(N)


def optimizers():
    """Without and with slots, and all that an optimizer does besides its own step."""
    made = keras.optimizers
    return {
        "SGD": lambda: made.SGD(0.1),
        "momentum": lambda: made.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "Adam": lambda: made.Adam(0.1),
        "AdamW": lambda: made.AdamW(0.1, global_clipnorm=0.5),
        "RMSprop": lambda: made.RMSprop(0.1, momentum=0.9, centered=True),
        "Adafactor": lambda: made.Adafactor(0.1),
        "Lamb": lambda: made.Lamb(0.1),
        "EMA": lambda: made.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
        "accumulation": lambda: made.Adam(0.1, gradient_accumulation_steps=2),
        "schedule": lambda: made.SGD(made.schedules.ExponentialDecay(0.1, 2, 0.5)),
        "loss scale": lambda: made.LossScaleOptimizer(
            made.Adam(0.1), initial_scale=4.0, dynamic_growth_steps=3
        ),
        "loss scale, accumulation": lambda: made.LossScaleOptimizer(
            made.SGD(0.1, gradient_accumulation_steps=2), initial_scale=4.0
        ),
    }


def variables():
    kernel = np.linspace(-1.0, 1.0, 6).reshape(2, 3).astype("float32")
    return [keras.Variable(kernel, name="kernel"), keras.Variable(np.ones(3, "float32"), name="b")]


def gradients(step):
    ops = keras.ops
    return [0.1 * (step + 1) * ops.ones((2, 3)), ops.convert_to_tensor(np.float32([0.0, 1.0, 2.0]))]


def updated(make, made_in, applied_in):
    """All variables after five steps; each context of creation and use is a function."""
    with made_in():
        optimizer, trained = make(), variables()
    with applied_in():
        for step in range(5):
            optimizer.apply(gradients(step), trained)
        optimizer.finalize_variable_values(trained)
    return [*trained, *optimizer.variables]


@case("outside replicas")
def optimizer_apply(lab):
    """`optimizer.apply` in the scope, and after it: every copy gets plain Keras's update.

    In the scope it also takes on variables and an optimizer that were made before.
    """
    plain = contextlib.nullcontext
    few = lab.backend != "torch" and not everything()  # where an update takes long
    for name, make in [*optimizers().items()][:: 2 if few else 1]:
        if lab.backend == "jax" and "loss scale" in name:
            continue  # plain Keras 3.15.1 leaks tracers there, outside of a compiled step
        expected = [keras.ops.convert_to_numpy(one) for one in updated(make, plain, plain)]
        strategy = lab.strategy()
        for applied_in in (strategy.scope, plain):
            found = updated(make, strategy.scope, applied_in)
            for value, variable in zip(expected, found, strict=True):
                copies = strategy.experimental_local_results(variable)
                lab.check(len(copies) in (1, lab.replicas), f"{name}: {len(copies)} copies")
                lab.equal([value] * len(copies), list(copies))
        if lab.backend != "jax" and name in ("Adam", "loss scale"):
            lab.equal(expected, updated(make, plain, strategy.scope))


@case("outside replicas")
def gradients_by_hand(lab):
    """A loop with a tape or `kd.value_and_grad` in the scope, out of `run`."""

    def losses(model):
        optimizer, told = keras.optimizers.Adam(0.1), []
        loss = lambda: keras.ops.mean(keras.ops.square(model(X) - keras.ops.convert_to_tensor(Y)))  # noqa: E731
        for _ in range(3):
            value, found = _gradients(lab, loss, model.trainable_variables)
            optimizer.apply(found, model.trainable_variables)
            told.append(keras.ops.convert_to_numpy(keras.ops.stop_gradient(value)))
        return told

    def trained(scope):
        model = lab.run(dense, [], scope)[0]
        with scope.scope() if scope else contextlib.nullcontext():
            told = losses(model)
        return [told, model.get_weights()]

    lab.equal(trained(None), trained(lab.strategy()), ADAPTIVE)


def _gradients(lab, loss, variables):
    if lab.backend != "tensorflow":
        return kd.value_and_grad(loss, variables)
    with tf.GradientTape() as tape:
        value = loss()
    return value, tape.gradient(value, variables)


@case("outside replicas")
def optimizer_build(lab):
    """`model.optimizer.build` after the scope, of optimizers made in it and outside, then `fit`."""
    made = optimizers()

    def trained(strategy, make, inside):
        optimizer = None if inside else make()
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = lab.run(lambda: dense(optimizer or make()), [])[0]
        model.optimizer.build(model.trainable_variables)
        history = model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0).history
        return [
            history,
            model.get_weights(),
            [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables],
        ]

    for name, inside in (("momentum", True), ("momentum", False), ("loss scale", True)):
        lab.equal(
            trained(None, made[name], inside),
            trained(lab.strategy(), made[name], inside),
            tolerance=ADAPTIVE,
        )


@case("outside replicas")
def losses_in_the_scope(lab):
    """A loss object and `model.compute_loss` in the scope, in a callback and after the scope."""
    rows = keras.ops.convert_to_tensor(X), keras.ops.convert_to_tensor(Y)

    def losses(model):
        predicted = model(rows[0])
        return [
            float(keras.losses.MeanSquaredError()(Y, predicted)),
            float(keras.losses.Huber(reduction="mean_with_sample_weight")(Y, predicted)),
            float(model.compute_loss(y=rows[1], y_pred=predicted)),
        ]

    def found(strategy):
        seen = []
        callback = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(losses(callback.model))
        )
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = lab.run(dense, [])[0] if not strategy else dense()
            seen.append(losses(model))
            model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[callback], shuffle=False)
            seen.append(losses(model))
        model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[callback], shuffle=False)
        return [*seen, losses(model)]

    expected = found(None)
    keras.utils.set_random_seed(1337)
    lab.equal(expected, found(lab.strategy()))


@case("outside replicas")
def a_loss_in_a_users_metric(lab):
    """A user-defined metric that calls a Keras loss sees the whole batch undivided."""

    def build():
        largest = largest_error(error=keras.losses.MeanSquaredError())
        return stack([keras.layers.Dense(1)], metrics=[largest])

    lab.same(
        build, lambda model: model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0).history
    )


@case("outside replicas", replicas=(2, 3))
def integers_of_a_metric(lab):
    """A metric that counts in integers, updated in the scope: no part of a count is lost."""

    def found(made_in):
        with made_in():
            metric = keras.metrics.MeanIoU(num_classes=3)
            metric.update_state([0, 1, 2, 2, 1], [0, 1, 2, 1, 1])
            metric.update_state([0, 0], [0, 2])
            return [keras.ops.convert_to_numpy(metric.total_cm.value), float(metric.result())]

    lab.equal(found(contextlib.nullcontext), found(lab.strategy().scope))
