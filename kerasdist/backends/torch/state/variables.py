"""Lets a replica read and write the variables of the model.

Every read and write of a Keras variable passes through the `keras.StatelessScope` of the calling
thread. In such a scope a replica reads an alias: a leaf tensor of its own that shares the
variable's storage (a copy, if it is on another device). So after a backward pass
``variable.value.grad`` is the replica's own gradient. A replica that is alone in its process reads
the variable's value itself. The values that a replica assigns are stored apart from those of the
other replicas, until the step's `Rules` combine the values of all replicas: in `fit` the rules of
`kerasdist.backends.torch.fit.fit_rules`, in custom loops the rules of
`kerasdist.backends.torch.state.components`.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.backends.base.kept_state import KeptState
from kerasdist.backends.torch import internals
from kerasdist.backends.torch.replica.placing import move_together
from kerasdist.backends.torch.state.shards import shard_of
from kerasdist.core.context import current
from kerasdist.errors import UnsupportedError

if TYPE_CHECKING:
    from kerasdist.backends.torch.state.gathered import ShardedWeights


@final
class Alias:
    """A replica's autograd leaf for one variable. The leaf and its gradient outlive a step."""

    __slots__ = ("_variable", "address", "changes", "is_copy", "leaf", "source")

    def __init__(
        self,
        variable: keras.Variable,
        source: torch.Tensor,
        forget: Any,
        device: torch.device,
        *,
        is_copy: bool,
    ) -> None:
        self._variable = weakref.ref(variable, forget)
        self.source = source
        self.address = source.data_ptr()
        self.is_copy = is_copy
        # A leaf that is no copy shares the variable's memory, and so is never outdated.
        self.changes = internals.COUNT_OF_CHANGES.of(source) if is_copy else 0
        leaf = source.detach()
        if is_copy:
            leaf = leaf.to(device, copy=True)
        self.leaf = leaf.requires_grad_(source.requires_grad)

    @property
    def outdated(self) -> bool:
        """Whether the leaf is a copy of a variable that has changed since the copy was made."""
        return self.is_copy and internals.COUNT_OF_CHANGES.of(self.source) != self.changes


@torch.no_grad()
def update(aliases: Sequence[Alias], device: torch.device) -> None:
    """Copies the variables' present values into their aliases, which are copies on `device`."""
    if aliases:
        sources = [alias.source.detach() for alias in aliases]
        leaves = [alias.leaf.detach() for alias in aliases]
        internals.COPY_TO_EACH.value(leaves, move_together(device, sources))
        for alias in aliases:
            alias.changes = internals.COUNT_OF_CHANGES.of(alias.source)


class Rules(abc.ABC):
    """The rules by which replicas read and write variables in `fit`, or in custom loops.

    Attributes:
        is_fit: Whether these are the rules of `fit`, `evaluate` and `predict`.
        kept: Keeps the state of users' Python objects separately for each replica; None if the
            replicas may share this state.
        compiled: Calls a model in compiled form; None if models run uncompiled.
        ends_with_update: Whether the code that follows ``optimizer.apply`` in a step works without
            the new weights. If so, ``optimizer.apply`` does not wait for the other replicas.
        takes_turns: Whether the replicas of a process wait for each other in the middle of a step,
            so that they need threads.
    """

    is_fit = False
    ends_with_update = False
    takes_turns = False
    kept: KeptState | None = None
    compiled: Callable[..., Any] | None = None

    def begin(self, scopes: Sequence[ReplicaScope]) -> None:  # noqa: B027  in loops it does nothing
        """Starts a step of the replicas of this process."""

    def is_short(self, batch: object) -> bool:
        """Returns whether, in a step on this batch, replicas in threads use only one core each."""
        return False

    @abc.abstractmethod
    def own_value(
        self, scope: ReplicaScope, variable: keras.Variable, source: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns the replica's own value of a variable, None if all replicas share one value.

        In `fit` this method is called only for variables with the aggregation "sum", or for
        variables that have no value yet.
        """

    def assign_together(
        self, scope: ReplicaScope, variable: keras.Variable, value: torch.Tensor
    ) -> bool:
        """In a custom loop, combines the values that replicas assign to a mirrored variable.

        Returns whether the values were combined; if not, the replica keeps its value until
        `commit`.
        """
        return False

    @abc.abstractmethod
    def commit(self, scopes: Sequence[ReplicaScope], *, sums: bool) -> list[int]:
        """Writes the assigned values into the variables.

        If `sums` is False, variables that are aggregated only at the end of a step are left out.
        Returns the ids of the variables that were written, which every scope must `refresh`.
        """

    @abc.abstractmethod
    def pause(self, scopes: Sequence[ReplicaScope]) -> list[int]:
        """Commits assignments on all workers, before cross-replica code runs within a step.

        Returns the ids of the variables that were written, as `commit` does.
        """

    @abc.abstractmethod
    def end(self, scopes: Sequence[ReplicaScope]) -> None:
        """Ends a step."""


@final
class ReplicaScope(keras.StatelessScope):
    """The scope through which one replica reads and writes variables, entered for each step."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        *,
        copies: bool,
        is_only: bool = False,
        weights: ShardedWeights | None = None,
    ) -> None:
        super().__init__(initialize_variables=False)
        self.weights = weights  # the sharded weights; None if no weight is sharded
        self.rank = rank
        self.device = device
        # Whether this is the only replica of its process, on the device that holds the variables.
        self.is_only = is_only
        self._copies = copies
        # The result of `value_reader` is valid until a `Trial` begins. A `Trial` makes new scopes,
        # so this scope can store the result.
        self._read_stored = keras_compat.value_reader()
        self.weight = 1.0
        # Whether the step's backward pass has collectives besides the sums of gradients.
        self.sums_in_backward = False
        self.rules: Rules
        # `writes_equal`: whether all replicas assign equal values now. `written_equal`: the ids of
        # the variables to which all replicas have assigned equal values.
        self.writes_equal = False
        self.written_equal: set[int] = set()
        self._aliases: dict[int, Alias] = {}
        # The variables that were read, by id. This dict keeps the variables alive, so that no new
        # variable can get one of these ids.
        self._read: dict[int, keras.Variable] = {}
        # The variables that were assigned to, by id; `state_mapping` has their values.
        self.written: dict[int, keras.Variable] = {}
        # Variables to which compiled code has assigned, and whether replicas assign equal values.
        self.assigned: list[tuple[keras.Variable, bool]] = []
        # Buffers of torch modules by id: the module's own buffer, and this replica's copy of it.
        self.buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, weight: float, rules: Rules) -> None:
        """Starts a step."""
        self.weight = weight
        self.sums_in_backward = False
        self.rules = rules
        if self._copies:
            self._update_copies()

    def end(self) -> None:
        """Drops all references to the step's model and tensors, so that they can be freed."""
        del self.rules
        self.state_mapping.clear()
        self._read.clear()
        self.written.clear()
        self.written_equal.clear()
        self.buffers.clear()

    def get_current_value(self, variable: keras.Variable) -> torch.Tensor:
        """Returns the replica's value of a variable."""
        if self.weights is not None and id(variable) not in self.written:
            gathered = self.weights.read(variable)
            if gathered is not None:
                return gathered
        value = self.state_mapping.get(id(variable))
        if value is None:
            source = self._read_stored(variable)
            if source is None or variable.aggregation == "sum" or not self.rules.is_fit:
                value = self.rules.own_value(self, variable, source)
            if value is None:
                value = self.leaf(variable, source)
            self.state_mapping[id(variable)] = value
            self._read[id(variable)] = variable
        return value

    def add_update(self, update: tuple[keras.Variable, torch.Tensor]) -> None:
        """Keeps the value that the replica assigns to a variable."""
        variable, value = update
        if self.weights is not None and shard_of(variable) is not None:
            raise UnsupportedError(
                "Expected only the optimizer to change a sharded variable in a step. Received: an "
                f"assignment to variable={variable.path!r}. {self.weights.advice}"
            )
        if self.weights is not None:
            value = self.weights.plain(value)
        if not self.rules.is_fit and self.rules.assign_together(self, variable, value):
            return
        # A copy is kept, as in Keras's own assign, because the caller may later change its tensor.
        value = value.detach().clone()
        if variable.trainable and self._read_stored(variable).requires_grad:
            value.requires_grad_(True)
        self.state_mapping[id(variable)] = value
        self.written[id(variable)] = variable
        (self.written_equal.add if self.writes_equal else self.written_equal.discard)(id(variable))

    def write_back(self) -> None:
        """Writes into the variables the values that this replica has assigned to them.

        Leaves out variables with the aggregation "sum", which are written when the step ends. Only
        a replica that is alone in its process may call this method.
        """
        if self.written:
            self.refresh(self.rules.commit([self], sums=False))

    def note_assigned(self) -> None:
        """Records the variables that compiled code has written outside of this scope."""
        for variable, is_equal in self.assigned:
            self.state_mapping[id(variable)] = self._read_stored(variable)
            self.written[id(variable)] = variable
            (self.written_equal.add if is_equal else self.written_equal.discard)(id(variable))
        self.assigned.clear()

    def buffer(self, buffer: torch.Tensor, changing: bool) -> torch.Tensor:
        """Returns a module's buffer on the replica's device.

        If `changing`, the replica may change the result in place. The result is then the replica's
        own copy, or the buffer itself if the process has only this replica.
        """
        if not changing:
            return buffer.to(self.device)
        trial = current.trial
        if trial is not None:
            buffer = trial.buffer(buffer)
        own = buffer if self.is_only else buffer.detach().to(self.device, copy=True)
        return self.buffers.setdefault(id(buffer), (buffer, own))[1]

    def clear_gradients(self, variables: Iterable[keras.Variable]) -> None:
        """Clears the replica's gradients of these variables."""
        for variable in variables:
            alias = self._aliases.get(id(variable))
            if alias is not None:
                alias.leaf.grad = None
            own = self.state_mapping.get(id(variable))
            if own is not None:
                own.grad = None
            if self.is_only and self._read_stored(variable) is not None:
                self.leaf(variable).grad = None

    def refresh(self, committed: Iterable[int]) -> None:
        """Makes the replica read committed variables again at their next use."""
        for key in committed:
            self.written.pop(key, None)
            self.state_mapping.pop(key, None)
        if self._copies or not self.rules.is_fit:  # values that were only read may be outdated
            kept = {key: self.state_mapping[key] for key in self.written}
            self.state_mapping.clear()
            self.state_mapping.update(kept)
        if self._copies:
            self._update_copies()

    def _update_copies(self) -> None:
        """Updates, all together, the copies whose variables have changed."""
        update([one for one in [*self._aliases.values()] if one.outdated], self.device)

    def leaf(self, variable: keras.Variable, stored: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the replica's leaf of a variable; `stored` is the variable's tensor, if known."""
        source = self._read_stored(variable) if stored is None else stored
        if self.weights is not None:
            leaf = self.weights.tensor(variable)
            if leaf is not None:
                return leaf
        if self.is_only:
            return source
        key = id(variable)
        alias = self._aliases.get(key)
        if (
            alias is None
            or source is not alias.source
            or source.data_ptr() != alias.address
            or source.requires_grad != alias.leaf.requires_grad
        ):
            aliases = self._aliases
            is_copy = self._copies or source.device != self.device
            alias = Alias(
                variable, source, lambda _: aliases.pop(key, None), self.device, is_copy=is_copy
            )
            aliases[key] = alias
        elif alias.is_copy and alias.outdated:
            update([alias], self.device)
        return alias.leaf


def commit_buffers(scopes: Sequence[ReplicaScope]) -> list[torch.Tensor]:
    """Combines the replicas' buffers; writes these into torch's modules, and returns them."""
    if not scopes[0].buffers:
        return []
    total = sum(scope.weight for scope in scopes)
    for key, (buffer, first) in scopes[0].buffers.items():
        if not buffer.is_floating_point():
            buffer.copy_(first)
            continue
        parts = [
            scope.buffers.get(key, (buffer, buffer))[1].to(buffer.device) * (scope.weight / total)
            for scope in scopes
        ]
        buffer.copy_(torch.stack(parts).sum(0))
    return [buffer for buffer, _ in scopes[0].buffers.values()]
