"""What users' steps return, by whatever key.

Each entry of a dict below is one way of writing a step; all of them were looked for in published
programs. History, each batch's logs and `evaluate` equal plain Keras's.
"""

from types import SimpleNamespace

import numpy as np

from tests.conformance import steps
from tests.conformance.actions import evaluate, fit
from tests.conformance.lazy import keras, tf
from tests.conformance.models import compiled, largest_error, regression
from tests.conformance.registry import case


def trackers():
    """A model's metrics, under names that no key of the logs has but for two."""
    m = keras.metrics
    means = ("total", "part", "before", "late", "cleared", "batch", "twice", "own")
    return SimpleNamespace(
        **{name: m.Mean(name=f"{name}_loss") for name in means},
        squares=m.Sum(name="squares"),
        rows=m.Sum(name="rows"),
        mse=m.MeanSquaredError(name="of_squares"),
        auc=m.AUC(name="under_curve", num_thresholds=20),
        cosine=m.CosineSimilarity(name="angle"),
        weighted=m.MeanAbsoluteError(name="weighted"),
        largest=largest_error("peak"),
        called=m.MeanAbsoluteError(name="called_error"),
    )


def of_metrics(model, y, y_pred, loss):
    """Results of metrics, and what can be made of them."""
    ops, m = keras.ops, model.trackers
    wide = ops.abs(y_pred[:, 0])
    before = m.before.result()
    for metric in (m.total, m.before, m.own):
        metric.update_state(loss)
    m.part.update_state(ops.mean(ops.abs(y_pred - y)))
    m.late.update_state(2.0 * loss)
    first = m.late.result()
    m.late.update_state(loss)
    m.cleared.update_state(loss)
    cleared = m.cleared.result()
    m.cleared.reset_state()
    m.batch.reset_state()
    m.batch.update_state(wide)
    m.twice.update_state(wide)
    m.squares.update_state(ops.square(y_pred - y))
    m.rows.update_state(ops.ones_like(y))
    m.mse.update_state(y, y_pred)
    m.auc.update_state(ops.cast(y > 0, "float32"), ops.sigmoid(y_pred))
    m.cosine.update_state(y, y_pred)
    m.weighted.update_state(y, y_pred, sample_weight=wide + 0.5)
    m.largest.update_state(y, y_pred)
    total, part = m.total.result(), m.part.result()
    return {
        "own": m.own.result(),
        "loss": total,
        "part_loss": total,  # the name of another metric
        "total_loss": part,
        "double": 2.0 * total,
        "sum": total + part,
        "difference": total - part,
        "ratio": m.squares.result() / m.rows.result(),
        "root": ops.sqrt(m.mse.result()),
        "perplexity": ops.exp(0.1 * total),
        "larger": ops.maximum(total, part),
        "before": before,
        "between": first,
        "after": m.late.result(),
        "cleared": cleared,
        "of_this_batch": m.batch.result(),
        "read_twice": m.twice.result() + m.twice.result(),
        "sum_of_rows": m.rows.result(),
        "mse": m.mse.result(),
        "auc": m.auc.result(),
        "cosine": m.cosine.result(),
        "weighted_mae": m.weighted.result(),
        "peak_error": m.largest.result(),
        "twice_the_peak": 2.0 * m.largest.result(),
        "called": m.called(y, y_pred),
        "whole_number": ops.cast(10.0 * total, "int32"),
        "above": total > part,
        "chosen": ops.where(total > part, part, total),
        "excess": loss - total,
        "product": loss * total,
        "losses": {"inner": total, "other": part},
    }


def of_few_metrics(model, y, y_pred, loss):
    m = model.trackers
    m.total.update_state(loss)
    m.batch.reset_state()
    m.batch.update_state(keras.ops.abs(y_pred))
    return {"loss": m.total.result(), "double": 2.0 * m.total.result(), "x": m.batch.result()}


def of_the_batch(model, y, y_pred, loss):
    """No result of a metric: what a mean over the rows combines, and what it leaves alone."""
    ops = keras.ops
    state = {}
    if keras.backend.backend() != "jax":  # plain Keras has no values of variables there in a step
        rate = ops.convert_to_tensor(model.optimizer.learning_rate)
        state = {"weight": ops.sum(model.layers[-1].kernel), "rate": rate}
    return {
        **state,
        "loss": loss,
        "mean": ops.mean(y_pred),
        "scaled": 3.0 * loss + 1.0,
        "by_column": ops.mean(ops.concatenate([y, y_pred], 1), axis=0),
        "number": 10.0,
        "count": 3,
    }


def assemble(lab, report, *, metrics=None, decorate=None, **options):
    def build():
        kind = steps.of(lab.backend).reporting_model(report)
        if decorate is not None:
            kind.train_step, kind.test_step = map(decorate, (kind.train_step, kind.test_step))
        inputs = keras.Input((4,))
        model = kind(inputs, keras.layers.Dense(1)(inputs))
        model.trackers = trackers()
        # Keras follows the metrics of a model that are its attributes.
        for name, metric in vars(model.trackers).items():
            setattr(model, f"tracker_{name}", metric)
        return compiled(model, keras.optimizers.SGD(0.05), metrics=metrics, **options)

    return build


# 12 in batches of 6: even; 11 in batches of 4: 3 at the end; 9 in batches of 4: replicas are left
# empty, with what they added before.
def check(lab, report, rows=((12, 6), (11, 4), (9, 4)), strategy=None, **options):
    x, y = regression(12)
    actions = []
    for count, batch in rows:
        actions.append(fit(x[:count], y[:count], batch_size=batch, epochs=2))
        actions.append(batches_of_evaluate(x[:count], y[:count], batch))
        actions.append(evaluate(x[:count], y[:count], batch_size=batch))
    lab.same(assemble(lab, report, **options), *actions, strategy=strategy)


def batches_of_evaluate(x, y, batch):
    def action(model):
        seen = []
        log = keras.callbacks.LambdaCallback(on_test_batch_end=lambda _, logs: seen.append(logs))
        model.evaluate(x, y, batch_size=batch, callbacks=[log], verbose=0)
        return seen

    return action


@case("custom steps", replicas=(2,))
def results_of_metrics(lab):
    """Steps that return results of metrics by any key, and what is computed from them."""
    # Of "excess", which is 0 but for rounding, the first-batch check has a complaint.
    check(lab, of_metrics, strategy=lab.strategy(check="off"))


# Plain Keras on PyTorch has one step in a call.
@case("custom steps", backends=("tensorflow", "jax"))
def results_in_several_steps(lab):
    """The same, with several steps in a call of the train function, eagerly, and as functions."""
    rows = ((9, 4),)
    check(lab, of_few_metrics, rows, steps_per_execution=2)
    if lab.backend == "tensorflow":
        check(lab, of_few_metrics, rows, run_eagerly=True)

        def report(model, y, y_pred, loss):
            if tf.reduce_sum(loss) > 1e9:  # which AutoGraph converts
                loss = loss * 2.0
            return of_few_metrics(model, y, y_pred, loss)

        check(lab, report, rows, decorate=tf.function)


@case("custom steps")
def values_of_the_batch(lab):
    """Steps that return means over the batch, numbers and weights, and no metric's result."""
    check(lab, of_the_batch)


@case("custom steps", like="step_logs.results_of_metrics")
def renamed_logs_of_keras(lab):
    """Steps that rename what Keras's own steps return, and add a number and a mean of the batch."""
    x, y = regression(11)

    def renamed(returned, data):
        """Of the logs, or of (logs, state) as on JAX."""
        logs, *state = returned if isinstance(returned, tuple) else (returned,)
        own = {"number": 10.0, "mean_target": keras.ops.mean(data[1])}
        own |= {f"my_{key}": value for key, value in logs.items()}
        return (own, *state) if state else own

    class Model(keras.Model):
        def train_step(self, *given):
            return renamed(super().train_step(*given), given[-1])

        def test_step(self, *given):
            return renamed(super().test_step(*given), given[-1])

    def build():
        inputs = keras.Input((4,))
        model = Model(inputs, keras.layers.Dense(1)(inputs))
        metrics = ["mae", largest_error("peak")]
        return compiled(model, keras.optimizers.SGD(0.05), "mse", metrics=metrics)

    lab.same(
        build,
        fit(x, y, batch_size=4, epochs=2, validation_data=(x, y)),
        batches_of_evaluate(x, y, 4),
    )


# Plain Keras on JAX has no state for a metric that is not listed, and no strings in its logs.
@case("custom steps", backends=("tensorflow", "torch"))
def results_that_are_not_listed(lab):
    """Metrics that a model's `metrics` leaves out, and those of a model inside; a string."""
    x, y = regression(11)

    def report(model, y, y_pred, loss):
        for metric in (model.listed, model.unlisted, model.layers[-1].inner):
            metric.update_state(loss)
        model.peak.update_state(y, y_pred)
        return {
            "a": model.listed.result(),
            "b": model.unlisted.result(),
            "c": model.layers[-1].inner.result(),
            "peak_error": model.peak.result(),
            "text": "text",
        }

    def build():
        class Model(steps.of(lab.backend).reporting_model(report)):
            @property
            def metrics(self):
                return [self.listed]

        inputs = keras.Input((4,))
        inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        inner.inner = keras.metrics.Mean(name="inner")
        model = Model(inputs, inner(inputs))
        model.listed = keras.metrics.Mean(name="one")
        model.unlisted = keras.metrics.Mean(name="two")
        model.peak = largest_error("peak")
        return compiled(model, keras.optimizers.SGD(0.05))

    def text(model):
        seen = []
        log = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda _, logs: seen.append(str(np.asarray(logs["text"])))
        )
        model.fit(x, y, batch_size=4, callbacks=[log], verbose=0)
        return ["text" in one for one in seen]

    def without_text(model):
        seen = fit(x, y, batch_size=4)(model)
        for one in (*seen["batches"], seen["history"].history):
            del one["text"]
        return seen

    unchecked = lab.strategy(check="off")  # which compares no strings
    lab.same(build, text, without_text, strategy=unchecked)
