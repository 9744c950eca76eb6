"""The step of the custom loops that workers run beside one device."""

from tests.conformance.lazy import kd, keras


def squared_error_step(model, batch_size, optimizer=None):
    """A step of a replica: it trains on a pair of inputs and targets, and returns its loss."""
    optimizer = optimizer or model.optimizer

    def step(data):
        inputs, targets = data

        def loss():
            errors = keras.ops.square(model(inputs, training=True) - targets)
            errors = keras.ops.mean(errors, -1)
            return kd.compute_average_loss(errors, global_batch_size=batch_size)

        value, gradients = kd.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    return step
