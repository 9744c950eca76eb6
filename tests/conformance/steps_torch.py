"""Steps of the user with PyTorch's signature."""

import torch

from tests.conformance.steps import in_order, losses_of_two, mixing_losses_of_two, two_parts_model

mean, total, square = torch.mean, torch.sum, torch.square


def update(model, forward, scale=1.0):
    """A step down a loss, as PyTorch's users write it; ``forward`` returns the loss first."""
    model.zero_grad()
    loss, *others = forward()
    loss.backward()
    variables = list(model.trainable_weights)
    gradients = [scale * variable.value.grad for variable in variables]
    with torch.no_grad():
        model.optimizer.apply(gradients, variables)
    return loss, *others


def two_optimizer_model():
    class Model(two_parts_model()):
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
