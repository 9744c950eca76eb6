"""What a replica sees of the model's variables, and how its writes reach them.

Every read and write of a Keras variable passes the `keras.StatelessScope` of the calling thread. A
replica reads an alias: a leaf of its own that shares the variable's storage (on another device: a
copy), so that ``variable.value.grad`` after a backward pass is the replica's own gradient. What it
assigns stays with it until the step's `Rules` combine the replicas' values: in `fit` `FitRules`, in
custom loops `kerasdist.backends.torch.components.LoopRules`.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, final

import keras
import torch

from kerasdist import keras_seam
from kerasdist.errors import UnsupportedError


@final
class Alias:
    """A replica's leaf for one variable, kept from step to step, and its gradient with it."""

    __slots__ = ("_address", "_source", "_variable", "_version", "leaf")

    def __init__(
        self, variable: Any, source: torch.Tensor, device: torch.device, forget: Any
    ) -> None:
        """Makes the leaf.

        Args:
            variable: The Keras variable.
            source: Where it keeps its value.
            device: The replica's device.
            forget: Called when the variable is no more.
        """
        self._variable = weakref.ref(variable, forget)
        self._source = source
        self._address = source.data_ptr()
        self._version = source._version
        leaf = source.detach()
        if source.device != device:
            leaf = leaf.to(device)
        self.leaf = leaf.requires_grad_(source.requires_grad)

    def serves(self, source: torch.Tensor) -> bool:
        """Returns whether the leaf still stands for the variable's value, brought up to date.

        Args:
            source: Where the variable keeps its value now.
        """
        leaf = self.leaf
        if (
            source is not self._source
            or source.data_ptr() != self._address
            or source.requires_grad != leaf.requires_grad
        ):
            return False
        if source.device != leaf.device and source._version != self._version:
            leaf.detach().copy_(source.detach())
            self._version = source._version
        return True


class Rules(abc.ABC):
    """What a replica's reads and writes of variables mean: one kind for `fit`, one for loops."""

    @abc.abstractmethod
    def own_value(
        self, scope: ReplicaScope, variable: Any, source: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns what a replica holds apart of a variable, None where it shares the variable's.

        Args:
            scope: The replica's scope.
            variable: A Keras variable that this replica did not assign to.
            source: Where the variable keeps its value, None if it has none yet.
        """

    @abc.abstractmethod
    def assign_together(self, scope: ReplicaScope, variable: Any, value: torch.Tensor) -> bool:
        """Assigns to a variable for all replicas at once, if that is what the variable wants.

        Args:
            scope: The replica's scope.
            variable: A Keras variable.
            value: This replica's value.

        Returns:
            Whether it was done; if not, the replica keeps the value until `commit`.
        """

    @abc.abstractmethod
    def commit(self, scopes: Sequence[ReplicaScope], *, sums: bool) -> list[int]:
        """Writes what the replicas keep into the variables.

        Args:
            scopes: The replicas' scopes, in the order of ranks.
            sums: Whether to write those too that are aggregated when they are read.

        Returns:
            The ids of the variables that were written; the scopes are to `settle` them.
        """


@final
class ReplicaScope(keras.StatelessScope):
    """The variables as one replica sees them; entered for each of its steps."""

    def __init__(self, rank: int, device: torch.device, *, copies: bool) -> None:
        """Makes the scope of one replica.

        Args:
            rank: The replica's number.
            device: Its device.
            copies: Whether the variables live on another device.
        """
        super().__init__(initialize_variables=False)
        self.rank = rank
        self.device = device
        self._copies = copies
        self.weight = 1.0
        self.rules: Rules = FIT
        self._aliases: dict[int, Alias] = {}
        # The variables that were assigned to; their values stand in `state_mapping`.
        self.written: dict[int, Any] = {}
        # Buffers of torch modules, by id: the module's own one, and this replica's copy.
        self.buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, weight: float, rules: Rules) -> None:
        """Starts a step: nothing is written yet.

        Args:
            weight: The replica's share of the batch.
            rules: What its reads and writes mean.
        """
        self.weight = weight
        self.rules = rules
        self.end()

    def end(self) -> None:
        """Forgets the step, so that no variable or tensor lives longer because of it."""
        self.state_mapping.clear()
        self.written.clear()
        self.buffers.clear()

    def get_current_value(self, variable: Any) -> torch.Tensor:
        """Returns the replica's value of a variable.

        Args:
            variable: A Keras variable.
        """
        value = self.state_mapping.get(id(variable))
        if value is None:
            value = self.state_mapping[id(variable)] = self._first_read(variable)
        return value

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        """Notes what the replica assigns to a variable.

        Args:
            update: The variable and its new value.
        """
        variable, value = update
        if self.rules.assign_together(self, variable, value):
            return
        # A copy, as Keras's own assign makes: what was assigned may be changed in place afterwards.
        value = value.detach().clone()
        if keras_seam.stored_value(variable).requires_grad:
            value.requires_grad_(True)
        self.state_mapping[id(variable)] = value
        self.written[id(variable)] = variable

    def buffer(self, buffer: torch.Tensor, changing: bool) -> torch.Tensor:
        """Returns the replica's buffer of a torch module.

        Args:
            buffer: The module's own.
            changing: Whether the module may change it in place.
        """
        if not changing:
            return buffer.to(self.device)
        _, copy = self.buffers.setdefault(
            id(buffer), (buffer, buffer.detach().to(self.device, copy=True))
        )
        return copy

    def clear_gradients(self, variables: Iterable[Any]) -> None:
        """Forgets the replica's gradients.

        Args:
            variables: Whose gradients.
        """
        for variable in variables:
            alias = self._aliases.get(id(variable))
            if alias is not None:
                alias.leaf.grad = None
            own = self.state_mapping.get(id(variable))
            if own is not None:
                own.grad = None

    def settle(self, committed: Iterable[int]) -> None:
        """Lets the replica see variables that were changed for all replicas.

        Args:
            committed: Ids of the variables whose own values were committed.
        """
        for key in committed:
            self.written.pop(key, None)
            self.state_mapping.pop(key, None)
        if self._copies or self.rules is not FIT:  # to be brought up to date at the next read
            kept = {key: self.state_mapping[key] for key in self.written}
            self.state_mapping.clear()
            self.state_mapping.update(kept)

    def _first_read(self, variable: Any) -> torch.Tensor:
        source = keras_seam.stored_value(variable)
        own = self.rules.own_value(self, variable, source)
        if own is not None:
            return own
        if source is None:
            source = keras_seam.stored_value(variable)  # the rules have seen to it
        key = id(variable)
        alias = self._aliases.get(key)
        if alias is None or not alias.serves(source):
            aliases = self._aliases
            alias = Alias(variable, source, self.device, lambda _: aliases.pop(key, None))
            aliases[key] = alias
        return alias.leaf


@final
class FitRules(Rules):
    """Contract C1: what a replica assigns stays with it, until the step ends."""

    def own_value(
        self, scope: ReplicaScope, variable: Any, source: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns zeros for a part of a sum: replica 0 alone starts from the variable's value.

        Args:
            scope: The replica's scope.
            variable: A Keras variable.
            source: Where it keeps its value.

        Raises:
            UnsupportedError: If the variable was made in this step.
        """
        if source is None:
            raise UnsupportedError(
                "Expected every variable to exist before the replicas run. Received: "
                f"variable={variable.path!r}, made inside a step. Make it in the layer's `build` "
                "or `__init__`, or call the model once on a batch before you train it."
            )
        if scope.rank and is_sum(variable):
            return torch.zeros_like(source, device=scope.device, requires_grad=False)
        return None

    def assign_together(self, scope: ReplicaScope, variable: Any, value: torch.Tensor) -> bool:
        """Returns False: the replicas' values are combined in `commit`.

        Args:
            scope: The replica's scope.
            variable: A Keras variable.
            value: This replica's value.
        """
        del scope, variable, value
        return False

    def commit(self, scopes: Sequence[ReplicaScope], *, sums: bool) -> list[int]:
        """Writes what the replicas assigned, combined by each variable's ``aggregation``.

        Args:
            scopes: The replicas' scopes, in the order of ranks.
            sums: Whether to write sums too. In the middle of a step they must stay parts.
        """
        written: dict[int, Any] = {}
        for scope in scopes:
            written.update(scope.written)
        if not sums:
            written = {key: variable for key, variable in written.items() if not is_sum(variable)}
        if written:
            with torch.no_grad():
                targets = [keras_seam.stored_value(variable) for variable in written.values()]
                values = [
                    _combined(key, variable, target, scopes)
                    for (key, variable), target in zip(written.items(), targets, strict=True)
                ]
                torch._foreach_copy_(targets, values)
        return list(written)


FIT = FitRules()


def is_sum(variable: Any) -> bool:
    """Returns whether a variable is a sum over the replicas, as the state of a metric is.

    Args:
        variable: A Keras variable.
    """
    return variable.aggregation == "sum"


@torch.no_grad()
def commit_buffers(scopes: Sequence[ReplicaScope]) -> None:
    """Writes the replicas' buffers into torch's modules: their mean over the examples.

    Args:
        scopes: The replicas' scopes, in the order of ranks.
    """
    total = sum(scope.weight for scope in scopes)
    for key, (buffer, first) in scopes[0].buffers.items():
        if not buffer.is_floating_point():
            buffer.copy_(first)
            continue
        parts = [
            scope.buffers.get(key, (buffer, buffer))[1].to(buffer.device) * scope.weight
            for scope in scopes
        ]
        buffer.copy_(torch.stack(parts).sum(0) / total)


def _combined(
    key: int, variable: Any, target: torch.Tensor, scopes: Sequence[ReplicaScope]
) -> torch.Tensor:
    parts = [scope.state_mapping[key].detach() for scope in scopes if key in scope.written]
    if target.device != parts[-1].device:
        parts = [part.to(target.device) for part in parts]
    if is_sum(variable):
        # Replica 0 started from the value itself, the others from zero.
        total = parts[0] if key in scopes[0].written else target + parts[0]
        for part in parts[1:]:
            total = total + part
        return total
    if variable.aggregation == "mean" and target.is_floating_point():
        weights = [scope.weight for scope in scopes if key in scope.written]
        return torch.stack(
            [part * (weight / sum(weights)) for part, weight in zip(parts, weights, strict=True)]
        ).sum(0)
    return parts[0]
