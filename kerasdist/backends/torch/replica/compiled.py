"""The forward pass of a worker's replica, compiled by ``torch.compile``.

With ``jit_compile=True`` Keras compiles its whole step. But in a replica the update of the
variables waits for the other workers, and compiled code cannot wait. So here only the calls of
models are compiled, together with their backward passes. The hooks that sum gradients
(`reducer.py`) work as without a compiler. Collectives in layers, and random draws from a replica's
own generator, are custom operators in the compiled code (`graph_ops.py`).

A worker's replica is the only one in its process, and reads the variables themselves, not copies of
them. So the compiled code can run outside of the replica's scope, as plain Keras's code does.
Afterwards the scope gets the list of variables that the compiled code has written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.backends.torch import internals
from kerasdist.backends.torch.replica.collectives import TorchCollectives, collectives_here
from kerasdist.core.user_warnings import warn_user


@cache
def _install() -> None:
    """Installs the hook into assignments to variables, once per process."""
    keras_compat.install(assign=_assign)


def _assign(original: Callable[..., Any], variable: keras.Variable, value: object) -> Any:
    """Records an assignment in compiled code, which runs outside of the replica's scope."""
    collectives = collectives_here()
    if collectives is not None and keras_compat.get_stateless_scope() is None:
        collectives.scope.assigned.append((variable, collectives.scope.writes_equal))
    return original(variable, value)


@final
class CompiledCalls:
    """Calls a model, and other models that its steps call, in compiled form."""

    def __init__(self) -> None:
        """Prepares compilation, which torch starts at the first call."""
        _install()
        self._compiled = torch.compile(lambda model, args, kwargs: model(*args, **kwargs))
        self._gave_up = False

    def __call__(
        self,
        collectives: TorchCollectives,
        model: Any,
        plain: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a model in compiled form; if the model cannot be compiled, calls `plain`."""
        if self._gave_up:
            return plain(*args, **kwargs)
        if any(variable.aggregation == "sum" for variable in model.non_trainable_variables):
            # In place of the value of such a variable, every replica except the first must read
            # zeros. The replica's scope returns these zeros, but compiled code runs outside of the
            # scope and would read the variable's value.
            self._give_up(model, "one of its layers counts in a variable with aggregation='sum'")
            return plain(*args, **kwargs)
        scope, before = collectives.scope, collectives.calls
        scope.write_back()
        try:
            with keras_compat.outside_stateless_scopes():
                return self._compiled(model, args, kwargs)
        except internals.COMPILER_ERROR.value as error:
            # The compiled code has already called a collective. `plain` would call this collective
            # once more, but the other workers are already waiting in the next one.
            if collectives.calls > before:
                error.add_note("The model cannot be compiled: compile it with jit_compile=False.")
                raise
            said = " ".join(str(error).split())
            self._give_up(model, f"torch.compile raised {type(error).__name__}: {said}")
        finally:
            scope.note_assigned()
        return plain(*args, **kwargs)

    def _give_up(self, model: Any, why: str) -> None:
        self._gave_up = True
        warn_user(
            f"The model {model.name!r} runs uncompiled, in spite of jit_compile=True: {why:.400}. "
            "Its numbers are the same. Pass jit_compile=False to silence this."
        )
