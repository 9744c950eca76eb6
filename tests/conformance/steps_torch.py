"""How PyTorch's users write a loss and an update."""

import torch

mean, total, square = torch.mean, torch.sum, torch.square


def update(model, forward, scale=1.0):
    """A step down a loss; ``forward`` returns the loss first."""
    model.zero_grad()
    loss, *others = forward()
    loss.backward()
    variables = list(model.trainable_weights)
    apply(model.optimizer, [scale * variable.value.grad for variable in variables], variables)
    return loss, *others


def differentiable(forward):
    """What ``forward`` returns, and a function of a loss in it and of variables."""

    def gradients(loss, variables):
        values = [variable.value for variable in variables]
        return torch.autograd.grad(loss, values, retain_graph=True)

    return forward(), gradients


def apply(optimizer, gradients, variables):
    with torch.no_grad():
        optimizer.apply(gradients, variables)
