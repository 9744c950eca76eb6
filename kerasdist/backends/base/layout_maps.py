"""The meaning of a ``keras.distribution.LayoutMap``, which is the same on each backend."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, final

from kerasdist.errors import DeviceError


@final
class MapReader:
    """Looks up the layouts of weights and of layers' outputs in a LayoutMap; checks the map.

    Attributes:
        sizes: The size of each axis of the map's mesh.
    """

    def __init__(self, layout_map: Any) -> None:
        self._map, mesh = layout_map, layout_map.device_mesh
        self.sizes: dict[str | None, int] = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        self._paths: set[str] = set()  # paths of all weights that were looked up
        # For each path of a layer's output, a cached result of `output_axes`, as the second entry
        # of a pair. The first entry says how many weights and keys there were when the result was
        # computed. If a number has changed since then, `output_axes` computes the result again.
        self._outputs: dict[str, tuple[tuple[int, int], list[str | None] | None]] = {}
        self._looked_through = 0, 0, 0  # how many weights, keys and outputs the last check saw

    def require_useful(self) -> None:
        """Raises a ValueError if a key of the map matches no variable and no layer's output."""
        there = len(self._paths), len(self._map), len(self._outputs)
        if there == self._looked_through:  # nearly always, because every step calls this
            return
        paths = self._paths | self._outputs.keys()
        used = {id(self._map[path]) for path in paths}
        for key, layout in self._map.items():
            may_follow = key.endswith("output") and not self._outputs
            if id(layout) not in used and not may_follow:
                near = difflib.get_close_matches(key, paths, 3, cutoff=0.0)
                raise ValueError(
                    "Expected each key of the LayoutMap to be the path of a variable, or of a "
                    "layer's output, such as 'sequential/dense/output', or a regular expression "
                    f"that matches such paths. Received: key={key!r}, which fits no variable that "
                    f"was made so far, and no output; the nearest paths are {', '.join(near)}. "
                    "Correct the key, leave it out, or make its model before the first step."
                )
        self._looked_through = there

    def output_axes(self, path: str) -> list[str | None] | None:
        """Returns, for each axis of a layer's output, the mesh's axis that shards it.

        Returns None if no key of the map matches the output, or if the key also matches a variable.
        """
        there = len(self._paths), len(self._map)
        before, axes = self._outputs.get(path, (None, None))
        if before != there:
            layout = self._map[path]
            is_own = layout is not None and all(self._map[one] is not layout for one in self._paths)
            axes = self._dividing(layout) if is_own else None
            self._outputs[path] = there, axes
        return axes

    def axes(self, weight: Any, shape: Sequence[int]) -> list[str | None] | None:
        """Returns, for each axis of a variable, the mesh's axis that shards it.

        The variable has the given shape. It is `weight` itself, or an optimizer's variable that
        belongs to `weight`. An axis of the mesh that has one device shards nothing. Returns None if
        the variable is not sharded.
        """
        self._paths.add(weight.path)
        layout, shape = self._map[weight.path], tuple(shape)
        if layout is None or tuple(weight.shape) != shape:
            return None
        counts = [self.sizes.get(one, 1) for one in layout.axes]
        if len(counts) != len(shape) or any(
            size % count for size, count in zip(shape, counts, strict=True)
        ):
            raise ValueError(
                "Expected, for each axis of the variable, None or an axis of the mesh whose size "
                f"divides it evenly. Received: layout={layout.axes} for the variable "
                f"{weight.path!r} of shape {shape}, on a mesh of {self.sizes}. Change the "
                "LayoutMap."
            )
        axes = self._dividing(layout)
        return axes if any(axes) else None

    def _dividing(self, layout: Any) -> list[str | None]:
        return [axis if self.sizes.get(axis, 1) > 1 else None for axis in layout.axes]

    def why(self, weight: Any, shape: Sequence[int]) -> str:
        """Returns the reason for the result of `axes`, in words for the table of shardings."""
        layout = self._map[weight.path]
        if layout is None:
            return "no key of the map"
        is_alike = tuple(weight.shape) == tuple(shape)
        return key_of(layout, self._map) if is_alike else "not of its weight's shape"


def key_of(layout: object, layout_map: Mapping[str, object]) -> str:
    """Returns the word "key", followed by the key that a layout has in its map."""
    return f"key {next(key for key, one in layout_map.items() if one is layout)}"


def other_devices(wanted: Sequence[str], known: Sequence[str]) -> DeviceError:
    """Returns the error for a LayoutMap whose mesh has other devices than the strategy."""
    return DeviceError(
        "Expected the mesh of the LayoutMap to have the strategy's devices, in the order of the "
        f"workers. Received: sharding=LayoutMap over {wanted}, devices={known}. Name the same "
        "devices."
    )
