"""What a training step computes, noted while it runs in a trial.

The hooks that Keras calls anyway look here whether a trial is going on. There is one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras

from kerasdist import context, keras_seam
from kerasdist.backends.trial import Trial
from kerasdist.training.draws import Draws

# By replica; None: one device.
Calls = dict[Any, list[tuple[Any, list[Any]]]]

_running: list[Probe] = []
_one_trial = threading.RLock()


@dataclass(eq=False)
class Probe:
    """Notes what one step computes.

    Attributes:
        trial: What the step is tried with.
        draws: The random draws, to be the same in each step of the trial.
        wants_layers: Whether to note the outputs of layers.
        gradients: By the number of the optimizer's step and the variable's path.
        added: What layers added to the loss, by layer and replica.
        calls: Layers in the order in which their calls ended, and their outputs.
    """

    trial: Trial
    draws: Draws
    wants_layers: bool = False
    gradients: dict[str, Any] = field(default_factory=dict)
    added: dict[Any, list[tuple[Any, Any]]] = field(default_factory=dict)
    calls: Calls = field(default_factory=dict)
    _applied: int = 0
    _applying: list[Any] = field(default_factory=list)

    def before_write(self, variable: Any) -> None:
        """Notes that a variable will be assigned to, outside of replicas.

        Args:
            variable: A Keras variable.
        """
        self.trial.keep([variable])

    @contextmanager
    def applying(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None
    ) -> Iterator[None]:
        """Notes the gradients of all replicas, or of one device, before they are applied inside.

        Args:
            optimizer: A Keras optimizer.
            gradients: Its gradients; None where there is none.
            variables: What they belong to; None: all that the optimizer knows.
        """
        if optimizer in self._applying:  # one function for it calls another
            yield
            return
        self._note_gradients(optimizer, gradients, variables)
        self._applying.append(optimizer)
        try:
            yield
        finally:
            self._applying.remove(optimizer)

    def _note_gradients(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None
    ) -> None:
        self.trial.ready(optimizer, variables)
        if isinstance(optimizer, keras_seam.LossScaleOptimizer):
            self.trial.ready(optimizer.inner_optimizer, variables)
            return  # it calls the inner one, if the gradients are finite
        known = keras_seam.optimized_variables(optimizer) if variables is None else variables
        self.trial.keep(one for one in known if isinstance(one, keras.Variable))
        self._applied += 1
        prefix = f"step {self._applied} of the optimizers, " if self._applied > 1 else ""
        for gradient, variable in zip(gradients, known, strict=False):
            if gradient is not None:
                name = prefix + getattr(variable, "path", getattr(variable, "name", "variable"))
                self.gradients[name] = self.trial.as_array(gradient)

    def note_added(self, layer: Any, loss: Any) -> None:
        """Notes what a layer adds to the loss.

        Args:
            layer: The layer.
            loss: A tensor, or a structure of tensors.
        """
        values = [self.trial.as_array(one) for one in keras.tree.flatten(loss)]
        self.added.setdefault(_replica(), []).append((layer, sum(one.sum() for one in values)))

    def note_call(self, layer: Any, outputs: Any) -> None:
        """Notes what a layer returned.

        Args:
            layer: The layer.
            outputs: A structure of tensors.
        """
        arrays = [
            self.trial.as_array(one)
            for one in keras.tree.flatten(outputs)
            if keras.ops.is_tensor(one)
        ]
        self.calls.setdefault(_replica(), []).append((layer, arrays))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what the step inside computes."""
        with ExitStack() as stack:
            if not self.trial.sees_inside:
                yield
                return
            if self.wants_layers:
                stack.enter_context(keras_seam.layer_calls_noted(self.note_call))
            stack.enter_context(keras_seam.draws_replaced(self.draws.draw))
            self.draws.begin()
            _running.append(self)
            stack.callback(_running.pop)
            yield


def running() -> Probe | None:
    """Returns the probe of the step that is being tried, None where none is."""
    return _running[-1] if _running else None


@contextmanager
def one_trial() -> Iterator[None]:
    """Lets one trial go on at a time."""
    with _one_trial:
        yield


def _replica() -> Any:
    replica = context.replica()
    return None if replica is None else replica.replica_id_in_sync_group
