"""Steps of the user with JAX's signature: state in, state out."""

import jax
import keras

from tests.conformance.steps import build_parts, losses_of_two, parts


def updated(metrics, values, update):
    """(logs, values) after ``update(metric, its values)`` on each metric, by the guide."""
    logs, new, taken = {}, [], 0
    for metric in metrics:
        mine = values[taken : taken + len(metric.variables)]
        taken += len(metric.variables)
        mine = update(metric, mine)
        logs[metric.name] = metric.stateless_result(mine)
        new += mine
    return logs, new


def step_down(model, state, x, loss_of, scale=1.0):
    """The loss, the predictions and the state after a step.

    ``loss_of`` is a function of the predictions and of what layers have added.
    """
    trainable, non_trainable, optimizer, metrics = state

    def compute(trainable, non_trainable):
        y_pred, non_trainable, losses = model.stateless_call(
            trainable, non_trainable, x, training=True, return_losses=True
        )
        return loss_of(y_pred, losses), (y_pred, non_trainable)

    (loss, (y_pred, non_trainable)), gradients = jax.value_and_grad(compute, has_aux=True)(
        trainable, non_trainable
    )
    gradients = [scale * gradient for gradient in gradients]
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    return loss, y_pred, (trainable, non_trainable, optimizer, metrics)


def guide_model(scale=1.0):
    class Model(keras.Model):
        def train_step(self, state, data):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

            def loss_of(y_pred, losses):
                return self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)

            loss, y_pred, (*state, metrics) = step_down(self, state, x, loss_of, scale)

            def update(metric, values):
                if metric.name == "loss":
                    return metric.stateless_update_state(values, loss)
                return metric.stateless_update_state(values, y, y_pred, sample_weight=sample_weight)

            logs, metrics = updated(self.metrics, metrics, update)
            return logs, (*state, metrics)

        def test_step(self, state, data):
            trainable, non_trainable, metrics = state
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=False)

            def update(metric, values):
                if metric.name == "loss":
                    return values
                return metric.stateless_update_state(values, y, y_pred)

            logs, metrics = updated(self.metrics, metrics, update)
            del logs["loss"]
            return logs, (trainable, non_trainable, metrics)

        def predict_step(self, state, data):
            trainable, non_trainable = state
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            outputs, non_trainable = self.stateless_call(
                trainable, non_trainable, x, training=False
            )
            return {"double": 2.0 * outputs, "input": x}, non_trainable

    return Model


def two_optimizer_model():
    """Keras's state on JAX holds one optimizer: the second one's variables travel as a layer's."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            parts(self)

        def build(self, shape):
            build_parts(self, shape)
            self.optimizer.build(self.trainable_variables)
            self.built = True

        @property
        def non_trainable_variables(self):
            return [*super().non_trainable_variables, *self.judge_optimizer.variables]

        @property
        def metrics(self):
            return [self.judge_loss, self.maker_loss]

        def call(self, x):
            return self.judge(self.maker(x))

        def train_step(self, state, data):
            trainable, non_trainable, optimizer, metrics = state
            x, _ = data
            real = x[:, :3]
            count = len(self.judge_optimizer.variables)
            rest, judge_state = non_trainable[:-count], non_trainable[-count:]
            made_by = len(self.maker.trainable_variables)

            def both(trainable):
                maker, judge = trainable[:made_by], trainable[made_by:]
                made, _ = self.maker.stateless_call(maker, [], x)
                judged_made, _ = self.judge.stateless_call(judge, [], made)
                judged_real, _ = self.judge.stateless_call(judge, [], real)
                return losses_of_two(made, real, judged_made, judged_real)

            judge_loss, judge_gradients = jax.value_and_grad(lambda t: both(t)[0])(trainable)
            maker_loss, maker_gradients = jax.value_and_grad(lambda t: both(t)[1])(trainable)
            judge, judge_state = self.judge_optimizer.stateless_apply(
                judge_state, judge_gradients[made_by:], trainable[made_by:]
            )
            still = [jax.numpy.zeros_like(value) for value in trainable[made_by:]]
            made, optimizer = self.optimizer.stateless_apply(
                optimizer, [*maker_gradients[:made_by], *still], trainable
            )
            trainable = [*made[:made_by], *judge]
            scalars = {"judge_loss": judge_loss, "maker_loss": maker_loss}
            logs, metrics = updated(
                self.metrics,
                metrics,
                lambda metric, mine: metric.stateless_update_state(mine, scalars[metric.name]),
            )
            return logs, (trainable, [*rest, *judge_state], optimizer, metrics)

    return Model


def reporting_model(report):
    class Model(keras.Model):
        def reported(self, metrics, *values):
            with keras.StatelessScope(zip(self.metrics_variables, metrics, strict=True)) as scope:
                logs = report(self, *values)
            return logs, [scope.get_current_value(one) for one in self.metrics_variables]

        def train_step(self, state, data):
            x, y = data

            def loss_of(y_pred, losses):
                return jax.numpy.mean(jax.numpy.square(y_pred - y)) + sum(losses)

            loss, y_pred, (*state, metrics) = step_down(self, state, x, loss_of)
            logs, metrics = self.reported(metrics, y, y_pred, loss)
            return logs, (*state, metrics)

        def test_step(self, state, data):
            trainable, non_trainable, metrics = state
            x, y = data
            y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x)
            loss = jax.numpy.mean(jax.numpy.square(y_pred - y))
            logs, metrics = self.reported(metrics, y, y_pred, loss)
            return logs, (trainable, non_trainable, metrics)

    return Model
