"""Tensors that users' layers keep as attributes in a step, such as ``self.z = encoder(x)``.

The replicas of a process share the layers. While one waits, the others set the same attributes: so
each takes away what it has kept, and puts it back when it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, final

from kerasdist.core.structures import flatten


@final
class KeptTensors:
    """The tensors that the running replica has set on layers in a step, also in lists and dicts.

    All else is common to the replicas, such as a layer that the first call makes.
    """

    def __init__(self, layers: Sequence[Any], *kinds: type[Any]) -> None:
        """Begins a step with layers whose classes are users', and tensors of some kinds."""
        self._attributes: list[dict[str, Any]] = list(map(vars, layers))
        self._before = list(map(dict, self._attributes))
        self._kinds = kinds
        self._of_first: Sequence[dict[str, Any]] = ()

    def take(self) -> list[dict[str, Any]]:
        """Takes away what the replica has kept: the attributes are as they were before the step."""
        taken: list[dict[str, Any]] = []
        for now, before in zip(self._attributes, self._before, strict=True):
            if len(now) == len(before) and all(map(is_, now.values(), before.values())):
                taken.append({})  # as nearly always, and soon seen
                continue
            changed = {name: one for name, one in now.items() if one is not before.get(name, self)}
            own = {name: one for name, one in changed.items() if self._is_of_tensors(one)}
            for name in own:
                del now[name]
            now.update({name: before[name] for name in own if name in before})
            taken.append(own)
        return taken

    def put_back(self, taken: Sequence[dict[str, Any]]) -> None:
        """Puts back what a replica has kept."""
        for now, own in zip(self._attributes, taken, strict=False):
            now.update(own)

    def finish(self, replica: int) -> None:
        """Ends the step of a replica; what the first one has kept stays for the code after it."""
        taken = self.take()
        if not replica:
            self._of_first = taken

    def end(self) -> None:
        """Ends the step, and forgets the layers, which functions of TensorFlow would hold."""
        self.put_back(self._of_first)
        self._attributes, self._before = [], []

    def _is_of_tensors(self, value: object) -> bool:
        leaves = flatten(value) if isinstance(value, list | tuple | dict) else [value]
        return all(isinstance(leaf, self._kinds) for leaf in leaves)
