"""Compares a training step with one device when the user asks for it, and reports the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kerasdist import keras_compat
from kerasdist.backends.base.metering import rows_of
from kerasdist.check.comparison import Comparison, compare
from kerasdist.check.differences import Difference, worst
from kerasdist.check.user_code import places
from kerasdist.errors import ScopeError
from kerasdist.training import worker_agreement
from kerasdist.training.binding import binding_of


@dataclass(frozen=True)
class OneDeviceComparison:
    """A training step under a strategy, beside the same step on one device.

    Example::

        comparison = kd.compare_with_one_device(model, x, y)
        print(comparison)

    Attributes:
        examples: How many examples the batch has.
        strategy: The strategy.
        loss: How the loss that the step reported differs; None if it reported none.
        outputs: How the model's outputs differ, where they differ most; None if the step does not
            call the model. In a job, those of the replicas of one worker.
        gradients: The gradient that differs most; None if no optimizer was called.
        weights: The trainable variable whose change differs most. Elements count whose gradients
            agree: Adam's first step has the size of the rate, however small a gradient is.
        metrics: The metric that differs most, None if the step reported none.
        moving_statistics: The variable that is not trained, such as a moving mean, whose change
            differs most; None if there is none.
        more_than_rounding: All that differs by more than rounding can explain, in the order of a
            step: loss, metrics, gradients, variables.
        where: The user code that may mix examples; empty if nothing differs.
        draws_differ: Why random draws could not be made equal; None if they could. What differs
            counts then if it is far more than one device's step varies by.
    """

    examples: int
    strategy: str
    loss: Difference | None
    outputs: Difference | None
    gradients: Difference | None
    weights: Difference | None
    metrics: Difference | None
    moving_statistics: Difference | None
    more_than_rounding: tuple[Difference, ...]
    where: str
    draws_differ: str | None

    @property
    def equal(self) -> bool:
        """Whether the strategy computes what one device computes, but for rounding."""
        return not self.more_than_rounding

    def __str__(self) -> str:
        verdict = (
            "computes what one device computes"
            if self.equal
            else "does not compute what one device computes"
        )
        lines = [f"{self.strategy} {verdict}, for a batch of {self.examples} examples:"]
        for title, found in (
            ("loss", self.loss),
            ("outputs", self.outputs),
            ("gradients", self.gradients),
            ("weights", self.weights),
            ("metrics", self.metrics),
            ("moving statistics", self.moving_statistics),
        ):
            lines.append(f"  {title + ':':18} {_line(found)}")
        if self.where:
            lines.append(f"  look at {self.where}")
        if self.draws_differ is not None:
            lines.append(f"  random draws differ: {self.draws_differ}")
        return "\n".join(lines)


def report(model: Any, comparison: Comparison) -> OneDeviceComparison:
    """Returns a comparison as an `OneDeviceComparison`."""
    found = comparison.found
    beyond = tuple(comparison.beyond_rounding)
    return OneDeviceComparison(
        examples=comparison.examples,
        strategy=str(model.bound_strategy),
        loss=next((one for one in found.logs if one.name == "loss"), None),
        outputs=worst(found.outputs),
        gradients=worst(found.gradients),
        weights=worst(found.weights),
        metrics=worst(one for one in found.logs if one.name != "loss"),
        moving_statistics=worst(found.statistics),
        more_than_rounding=beyond,
        where=places(model, comparison) if beyond else "",
        draws_differ=comparison.draws_differ,
    )


def _line(found: Difference | None) -> str:
    if found is None:
        return "none"
    mark = "differ" if found.is_more_than_rounding else "equal"
    if mark == "equal" and found.relative > found.tolerance / 10:
        mark = "nearly equal"
    return f"{mark}, largest difference {found.absolute:.3g} in {found}"


def compare_with_one_device(
    model: Any, x: Any, y: Any = None, sample_weight: Any = None
) -> OneDeviceComparison:
    """Compares a training step of a model under its strategy with the same step on one device.

    Both steps are taken on copies of the model's state, get the same batch, and draw the same
    random numbers, or leave dropout out. The model, the optimizer and the metrics are not touched,
    and other threads may use them meanwhile. `fit` does the same with its first batch where your
    code could mix examples, and warns if the steps differ.

    Random draws are made equal if code makes them by ``keras.random``, on PyTorch by any function
    of torch. Draws of ``tf.random``, NumPy and Python differ; what differs then counts if it is far
    more than one device's step varies by. On JAX, both steps are compiled programs: loss, metrics
    and variables are compared, outputs and gradients are not.

    With several workers, all must call it with the same global batch; all get the same report.

    Example::

        with strategy.scope():
            model = Contrastive()
            model.compile("adam", loss=my_loss)
        print(kd.compare_with_one_device(model, x[:64], y[:64]))

    Args:
        model: A compiled model that was made in the scope of a strategy of several devices. If it
            is not built, it is built.
        x: Inputs of one global batch: arrays or tensors of shape ``(N, ...)`` in any structure, N
            at least the number of replicas.
        y: Targets, likewise, or None.
        sample_weight: Weights of the examples, or None.

    Returns:
        An `OneDeviceComparison`; printed, it says what differs, and where to look.

    Raises:
        ScopeError: If the model was made outside of a strategy's scope.
        ValueError: If it is not compiled, or there are fewer examples than replicas.
        UnsupportedError: If the strategy has one device.
        DisagreementError: If workers give it other batches.
        ReplicaError: If the step fails on another worker; on that one its own error is raised.
    """
    binding = binding_of(model)
    if binding is None:
        raise ScopeError(
            "Expected a model that was made in a strategy's scope. Received: "
            f"model={model.name!r}, made outside of it. Make it in `with strategy.scope():`."
        )
    if not model.compiled:
        raise ValueError(
            f"Expected a compiled model. Received: model={model.name!r}, not compiled. Call "
            "model.compile(...) first."
        )
    batch = keras_compat.whole_batch(x, y, sample_weight)
    size = rows_of(batch)
    if size < binding.replicas.num_replicas:
        raise ValueError(
            f"Expected an example for each of the {binding.replicas.num_replicas} replicas. "
            f"Received: a batch of {size}. Give a larger one."
        )
    given = worker_agreement.given(binding, {"x": x, "y": y, "sample_weight": sample_weight})
    comparing = worker_agreement.working("compare_with_one_device", binding.replicas, model, given)
    with binding.replicas.placement(), comparing:
        model.prepare_step(batch)
        comparison = compare(model, batch, outputs=True)
        return report(model, comparison)
