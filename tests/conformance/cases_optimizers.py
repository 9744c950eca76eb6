"""Updates: every optimizer, clipping, accumulation, averaging, scaling, schedules."""

import contextlib

import numpy as np

from tests.conformance.actions import evaluate, fit, quiet_fit
from tests.conformance.compare import ADAPTIVE, BFLOAT16, FLOAT16, FLOAT32, NORMAL
from tests.conformance.lazy import kd, keras
from tests.conformance.models import compiled, dense, regression, stack, tagger, tokens
from tests.conformance.registry import REPLICAS, case

N, BATCH = 13, 6  # at last a batch of one row
X, Y = regression(N)


# By name: the class, its options, and the one like it. Of most the updates go element by element
# (`keras_compat.optimizers.ELEMENTWISE`); the last three look at whole variables.
OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 0.1}, "adam"),
    "sgd_nesterov": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}, "adam"),
    "adam": ("Adam", {"learning_rate": 0.02}, ""),
    "adam_amsgrad": ("Adam", {"learning_rate": 0.02, "amsgrad": True}, "adam"),
    "adamw": ("AdamW", {"learning_rate": 0.02, "weight_decay": 0.1}, "adam"),
    "rmsprop": ("RMSprop", {"learning_rate": 0.02, "centered": True, "momentum": 0.5}, "adam"),
    "adagrad": ("Adagrad", {"learning_rate": 0.1}, "adam"),
    "adadelta": ("Adadelta", {"learning_rate": 1.0}, "adam"),
    "adamax": ("Adamax", {"learning_rate": 0.02}, "adam"),
    "nadam": ("Nadam", {"learning_rate": 0.02}, "adam"),
    "ftrl": ("Ftrl", {"learning_rate": 0.1, "l1_regularization_strength": 0.001}, "adam"),
    "lion": ("Lion", {"learning_rate": 0.01}, "adam"),
    "adafactor": ("Adafactor", {"learning_rate": 0.02}, ""),
    "lamb": ("Lamb", {"learning_rate": 0.02}, "adafactor"),
    "muon": ("Muon", {"learning_rate": 0.02}, "adafactor"),
}


def optimizer_case(name, kind, options, like):
    def check(lab):
        # Before 3.13 plain Keras fails here: it asks TensorFlow's own variables for a Keras name.
        broken = kind == "Muon" and lab.backend == "tensorflow" and lab.keras_version < (3, 13)
        with lab.raises(AttributeError, "path") if broken else contextlib.nullcontext():
            lab.same(
                lambda: dense(getattr(keras.optimizers, kind)(**options)),
                fit(X, Y, batch_size=BATCH, epochs=2),
                tolerance=FLOAT32 if kind == "SGD" else ADAPTIVE,
            )

    title = f"`{kind}`" + (f" ({name.partition('_')[2]})" if "_" in name else "")
    case("optimizers", name=name, title=title, like=like and f"optimizers.{like}")(check)


for _name, _optimizer in OPTIMIZERS.items():
    optimizer_case(_name, *_optimizer)


def clip_case(option, value):
    def check(lab):
        n = 4 * lab.replicas
        x, y = np.ones((n, 1), "float32"), np.linspace(10.0, -9.0, n, dtype="float32")[:, None]

        def build():
            layer = keras.layers.Dense(1, kernel_initializer="zeros")
            return stack([layer], keras.optimizers.SGD(0.1, **{option: value}), inputs=(1,))

        lab.same(build, fit(x, y, batch_size=len(x), shuffle=False, epochs=2), share_plain=False)

    case(
        "clipping",
        replicas=REPLICAS,
        name=f"{option}_opposing",
        like="" if option == "global_clipnorm" else "optimizers.global_clipnorm_opposing",
        title=f"`{option}` of gradients that nearly cancel",
    )(check)


for _option, _value in (("clipnorm", 0.5), ("clipvalue", 0.3), ("global_clipnorm", 0.6)):
    clip_case(_option, _value)


@case("gradient accumulation", replicas=REPLICAS)
def accumulation(lab):
    """`gradient_accumulation_steps` with masks, Adam and ragged batches, over epochs."""
    x = tokens(23)
    y = np.random.default_rng(3).normal(size=(23, 5, 1)).astype("float32")

    def build():
        return compiled(tagger(), keras.optimizers.Adam(0.02, gradient_accumulation_steps=3), "mse")

    lab.same(build, fit(x, y, batch_size=5, epochs=2, shuffle=False), tolerance=ADAPTIVE)


@case("averaged weights", like="optimizers.ema_at_the_end")
def ema_overwrite(lab):
    """`use_ema` with `ema_overwrite_frequency`."""
    lab.same(
        lambda: dense(
            keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)
        ),
        fit(X, Y, batch_size=3, epochs=2),
    )


@case("averaged weights")
def ema_at_the_end(lab):
    """`use_ema` written to the weights when fit ends, and `SwapEMAWeights`."""
    build = lambda: dense(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8))  # noqa: E731
    lab.same(build, fit(X, Y, batch_size=3))
    lab.same(
        build,
        fit(
            X,
            Y,
            batch_size=3,
            validation_data=(X, Y),
            callbacks=lambda: [keras.callbacks.SwapEMAWeights()],
        ),
    )


@case("precision", like="optimizers.loss_scale_overflow")
def loss_scale(lab):
    """`LossScaleOptimizer`: the scale grows as on one device."""
    lab.same(
        lambda: dense(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.1), initial_scale=256.0, dynamic_growth_steps=2
            )
        ),
        fit(X, Y, batch_size=3, epochs=2),
    )


@case("precision")
def loss_scale_overflow(lab):
    """A gradient that overflows on one replica skips the step on all and halves the scale."""
    x, y = regression(12)
    x[5] = 3e38
    lab.same(
        lambda: dense(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=256.0),
            metrics=(),
        ),
        quiet_fit(x, y, batch_size=4, shuffle=False),
    )


@case("precision", replicas=(3,))
def scaled_loss_through_collectives(lab):
    """A scaled loss whose gradient passes from replica to replica, in uneven batches."""

    def build():
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.inner = keras.layers.Dense(4)
                self.normal = keras.layers.BatchNormalization(momentum=0.5)
                self.outer = keras.layers.Dense(1)

            def call(self, x, training=False):
                return self.outer(self.normal(self.inner(x), training=training))

            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
                own = super().compute_loss(x, y, y_pred, sample_weight, training)
                every = kd.global_batch(y_pred)
                return own + keras.ops.var(every) + keras.ops.mean(y_pred**2)

        model = Model()
        scaling = keras.optimizers.LossScaleOptimizer
        model.compile(
            scaling(keras.optimizers.SGD(0.05), initial_scale=2.0**8, dynamic_growth_steps=2), "mse"
        )
        model.build((None, 4))
        return model

    # Unequal shares; then a replica without an example.
    for size in (4, 2):
        lab.same(build, fit(X, Y, batch_size=size, shuffle=False), tolerance=NORMAL)


def under_policy(lab, policy, tolerance):

    def build():
        keras.config.set_dtype_policy(policy)
        return dense(keras.optimizers.SGD(0.1))

    return lab.same(
        build,
        fit(X, Y, batch_size=BATCH, epochs=2),
        evaluate(X, Y, batch_size=BATCH),
        tolerance=tolerance,
    )


@case("precision")
def mixed_float16(lab):
    """`mixed_float16`: Keras wraps the optimizer in a `LossScaleOptimizer`."""
    model = under_policy(lab, "mixed_float16", FLOAT16)
    name = type(model.optimizer).__name__
    lab.check(name == "LossScaleOptimizer", f"expected a LossScaleOptimizer, received {name}")


@case("precision", like="optimizers.mixed_float16")
def mixed_bfloat16(lab):
    """`mixed_bfloat16`."""
    under_policy(lab, "mixed_bfloat16", BFLOAT16)


def centered(gradient):
    """Gradient centralization: each unit's incoming gradients get the mean zero."""
    if gradient is None or len(gradient.shape) < 2:
        return gradient
    axes = list(range(len(gradient.shape) - 1))
    return gradient - keras.ops.mean(gradient, axis=axes, keepdims=True)


@case("optimizers")
def own_apply(lab):
    """An optimizer whose own `apply` changes the gradients, or applies them twice."""

    class Centered(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            super().apply([centered(one) for one in grads], trainable_variables)

    class Twice(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)
            super().apply([one * 0.5 for one in grads], trainable_variables)

    def scaled():
        return keras.optimizers.LossScaleOptimizer(Centered(0.1), initial_scale=2.0**8)

    for make in (lambda: Centered(0.1, momentum=0.9), lambda: Twice(0.1), scaled):
        lab.same(lambda make=make: dense(make()), fit(X, Y, batch_size=4, epochs=2))


@case("optimizers")
def one_for_some_layers(lab):
    """`MultiOptimizer`, whose `apply` calls those of others."""
    if "MultiOptimizer" not in dir(keras.optimizers):  # before Keras 3.15
        return

    def build():
        model = dense()
        first, rest = keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.1, momentum=0.9)
        several = keras.optimizers.OptimizerMap(rest, {f"{model.layers[0].name}/.*": first})
        return compiled(model, keras.optimizers.MultiOptimizer(several), "mse")

    lab.same(build, fit(X, Y, batch_size=4, epochs=2), tolerance=ADAPTIVE)


@case("schedules", like="optimizers.learning_rate_assigned")
def schedules(lab):
    """Learning-rate schedules count global steps; weight decay with variables excluded from it."""

    def build():
        rate = keras.optimizers.schedules.CosineDecay(0.1, 6, warmup_steps=2, warmup_target=0.2)
        optimizer = keras.optimizers.SGD(rate, weight_decay=0.05)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return dense(optimizer)

    lab.same(build, fit(X, Y, batch_size=3, epochs=2))


@case("optimizers")
def learning_rate_assigned(lab):
    """`optimizer.learning_rate` set between two fits; weight constraints after the update."""

    def build():
        constraint = keras.constraints.MaxNorm(0.3)
        layer = keras.layers.Dense(5, kernel_constraint=constraint)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        return stack([layer, keras.layers.Dense(1)], optimizer, metrics=["mae"])

    def lower(model):
        model.optimizer.learning_rate = 0.01

    lab.same(build, fit(X, Y, batch_size=4), lower, fit(X, Y, batch_size=4))
