"""Steps of the user with PyTorch's signature."""

import keras
import torch

from tests.conformance.steps import (
    in_order,
    losses_of_two,
    mixing_losses_of_two,
    parts,
    triplet_losses,
)


def guide_model(scale):
    class Model(keras.Model):
        def train_step(self, data):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            self.zero_grad()
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
            loss.backward()
            variables = list(self.trainable_weights)
            gradients = [scale * variable.value.grad for variable in variables]
            with torch.no_grad():
                self.optimizer.apply(gradients, variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred, sample_weight=sample_weight)
            return {metric.name: metric.result() for metric in self.metrics}

    return Model


def raw_loss_model():
    class Model(keras.Model):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.tracker = keras.metrics.Mean(name="raw")

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = torch.mean(torch.square(self(x, training=True) - y))
            loss.backward()
            gradients = [variable.value.grad for variable in self.trainable_weights]
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_weights)
            self.tracker.update_state(loss)
            return {"raw": self.tracker.result()}

    return Model


def reading_losses_model():
    class Model(keras.Model):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = torch.mean(torch.square(self(x, training=True) - y)) + sum(self.losses)
            loss.backward()
            gradients = [variable.value.grad for variable in self.trainable_weights]
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_weights)
            return {"raw": loss, "added": sum(self.losses)}

    return Model


def test_step_model():
    class Model(keras.Model):
        def test_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            y_pred = self(x, training=False)
            self.compute_loss(x=x, y=y, y_pred=y_pred, training=False)
            for metric in self.metrics:
                if metric.name != "loss":
                    metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics if m.name != "loss"}

        def predict_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"double": 2.0 * self(x, training=False), "input": x}

    return Model


def two_optimizer_model():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            parts(self)

        def build(self, shape):
            self.maker.build(shape)
            self.judge.build((None, 3))
            self.judge_optimizer.build(self.judge.trainable_variables)
            self.optimizer.build(self.maker.trainable_variables)
            self.built = True

        def call(self, x):
            return self.judge(self.maker(x))

        def train_step(self, data):
            x, _ = data
            real = x[:, :3]
            made = self.maker(x)
            judge_loss, maker_loss = losses_of_two(made, real, self.judge(made), self.judge(real))
            judge, maker = self.judge.trainable_variables, self.maker.trainable_variables
            judge_gradients = torch.autograd.grad(
                judge_loss, [variable.value for variable in judge], retain_graph=True
            )
            maker_gradients = torch.autograd.grad(
                maker_loss, [variable.value for variable in maker]
            )
            with torch.no_grad():
                self.judge_optimizer.apply(judge_gradients, judge)
                self.optimizer.apply(maker_gradients, maker)
            self.judge_loss.update_state(judge_loss.detach())
            self.maker_loss.update_state(maker_loss.detach())
            return {m.name: m.result() for m in (self.judge_loss, self.maker_loss)}

    return Model


def scaling_optimizers_model(together):
    class Model(two_optimizer_model()):
        def train_step(self, data):
            x, _ = data
            optimizers = self.judge_optimizer, self.optimizer
            variables = self.judge.trainable_variables, self.maker.trainable_variables
            metrics = self.judge_loss, self.maker_loss

            def scaled(index):
                made = self.maker(x)
                judged = self.judge(made), self.judge(x[:, :3])
                loss = mixing_losses_of_two(made, x[:, :3], *judged)[index]
                metrics[index].update_state(loss.detach())
                return optimizers[index].scale_loss(loss)

            def gradients(index, loss):
                return torch.autograd.grad(loss, [variable.value for variable in variables[index]])

            def apply(index, gradients):
                with torch.no_grad():
                    optimizers[index].apply(gradients, variables[index])

            in_order(together, scaled, gradients, apply)
            return {metric.name: metric.result() for metric in metrics}

    return Model


def triplet_model(*, repaired):
    class Siamese(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Dense(3)
            self.tracker = keras.metrics.Mean(name="loss")

        def call(self, inputs):
            return self.embedding(inputs)

        @property
        def metrics(self):
            return [self.tracker]

        def train_step(self, data):
            losses = triplet_losses(self, data[0])
            loss = losses.mean() if repaired else losses.sum()
            self.zero_grad()
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_weights])
            self.tracker.update_state(losses)
            return {"loss": self.tracker.result()}

    return Siamese


def reporting_model(report):
    class Model(keras.Model):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            y_pred = self(x, training=True)
            loss = torch.mean(torch.square(y_pred - y))
            loss.backward()
            gradients = [variable.value.grad for variable in self.trainable_weights]
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_weights)
            return report(self, y, y_pred, loss)

        def test_step(self, data):
            x, y = data
            y_pred = self(x, training=False)
            return report(self, y, y_pred, torch.mean(torch.square(y_pred - y)))

    return Model
