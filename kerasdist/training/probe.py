"""Records what a training step computes in a trial.

The hooks ask `running` whether a trial is going on. There is at most one trial at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras

from kerasdist import context, keras_compat
from kerasdist.backends.trial import Trial
from kerasdist.training.draws import Draws

# Layers and their outputs, by replica; the key None stands for one device.
Calls = dict[Any, list[tuple[Any, list[Any]]]]

_running: list[Probe] = []
_one_trial = threading.RLock()


@dataclass(eq=False)
class Probe:
    """Records what one step computes.

    Attributes:
        trial: The trial of the backend.
        draws: The random draws, which are equal in each step of the trial.
        wants_layers: Whether to record the outputs of layers.
        gradients: The gradients, by the number of the optimizer's step and the variable's path.
        added: The losses that layers added, with the layer, by replica.
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
        """Saves the value of a variable before it is assigned."""
        self.trial.keep([variable])

    @contextmanager
    def applying(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None
    ) -> Iterator[None]:
        """Records the gradients of all replicas, or of one device, before the optimizer runs."""
        if optimizer in self._applying:  # one of the hooked functions calls another
            yield
            return
        self._record_gradients(optimizer, gradients, variables)
        self._applying.append(optimizer)
        try:
            yield
        finally:
            self._applying.remove(optimizer)

    def _record_gradients(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None
    ) -> None:
        self.trial.ready(optimizer, variables)
        if isinstance(optimizer, keras_compat.LossScaleOptimizer):
            self.trial.ready(optimizer.inner_optimizer, variables)
            return  # it calls the inner one, if the gradients are finite
        known = keras_compat.optimized_variables(optimizer) if variables is None else variables
        self.trial.keep(one for one in known if isinstance(one, keras.Variable))
        self._applied += 1
        prefix = f"step {self._applied} of the optimizers, " if self._applied > 1 else ""
        for gradient, variable in zip(gradients, known, strict=False):
            if gradient is not None:
                name = prefix + getattr(variable, "path", getattr(variable, "name", "variable"))
                self.gradients[name] = self.trial.as_array(gradient)

    def record_loss(self, layer: Any, loss: Any) -> None:
        """Records a loss that a layer adds."""
        values = [self.trial.as_array(one) for one in keras.tree.flatten(loss)]
        self.added.setdefault(_replica(), []).append((layer, sum(one.sum() for one in values)))

    def record_call(self, layer: Any, outputs: Any) -> None:
        """Records the outputs of a layer."""
        arrays = [
            self.trial.as_array(one)
            for one in keras.tree.flatten(outputs)
            if keras.ops.is_tensor(one)
        ]
        self.calls.setdefault(_replica(), []).append((layer, arrays))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records what the step inside computes."""
        with ExitStack() as stack:
            if not self.trial.sees_inside:
                yield
                return
            if self.wants_layers:
                stack.enter_context(keras_compat.layer_calls_recorded(self.record_call))
            stack.enter_context(keras_compat.draws_replaced(self.draws.draw))
            self.draws.begin()
            _running.append(self)
            stack.callback(_running.pop)
            yield


def running() -> Probe | None:
    """Returns the probe of the step that is being tried, None outside of a trial."""
    return _running[-1] if _running else None


@contextmanager
def one_trial() -> Iterator[None]:
    """Runs one trial at a time."""
    with _one_trial:
        yield


def _replica() -> Any:
    replica = context.replica()
    return None if replica is None else replica.replica_id_in_sync_group


@contextmanager
def paused() -> Iterator[None]:
    """Records nothing inside, where a recorded update is repeated for other copies of variables."""
    held, _running[:] = _running[:], []
    try:
        yield
    finally:
        _running[:] = held
