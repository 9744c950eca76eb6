"""Describes which shards of a model's variables a device holds."""

from __future__ import annotations

import re
from typing import final

import keras
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import trainer_of
from kerasdist.core.sharding import size


@final
class ModelLayout:
    """How much of each variable of a model one device holds; ``print(layout)`` shows a table.

    Attributes:
        rows: A tuple for each variable of the model and of its optimizer: the variable's path, its
            shape, how it is sharded, why it is sharded in this way, and how many bytes of the
            variable one device holds. Bytes in the host's memory do not count.
        total_bytes: How many bytes all variables have.
        bytes_a_device: How many of these bytes one device holds.
        divided: The fraction of the bytes that belongs to sharded variables.
    """

    def __init__(self, model: keras.Model) -> None:
        """Describes a model. If it has no strategy, one device holds each variable as a whole."""
        trainer = trainer_of(model)
        optimizer = getattr(model, "optimizer", None)
        variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
        self.rows: list[tuple[str, tuple[int, ...], str, str, int]] = []
        self.total_bytes = self.bytes_a_device = divided = 0
        for variable in {id(one): one for one in variables}.values():
            shape = tuple(variable.shape)
            layout, why, held = ("whole", "no strategy", shape)
            if trainer:
                layout, why, held = trainer.replicas.held(variable)
            here, there = (keras_compat.nbytes(variable, one) for one in (held, shape))
            self.rows.append((variable.path, shape, layout, why, here))
            self.total_bytes += there
            self.bytes_a_device += here
            divided += 0 if layout.startswith("whole") else there
        self.divided = divided / max(self.total_bytes, 1)

    def table(self, most: int | None = None) -> Table:
        """Returns the rows as a table of the package ``rich``, which a rich console can print.

        Args:
            most: The largest number of rows, or None for one row per variable. With a number,
                variables whose paths differ only in numbers share a row, as in a stack of equal
                layers. The table then shows the rows with the most bytes, and adds up the others
                in one more row.
        """
        groups: dict[tuple[object, tuple[int, ...], str, str], list[tuple[str, int]]] = {}
        for index, (path, shape, layout, why, here) in enumerate(self.rows):
            alike = index if most is None else re.sub(r"_?\d+", "", path)
            groups.setdefault((alike, shape, layout, why), []).append((path, here))
        table = Table()
        for heading in ("variable", "shape", "layout", "why"):
            table.add_column(heading, overflow="fold")
        table.add_column("a device holds", justify="right")
        order = sorted(groups.items(), key=lambda one: -sum(here for _, here in one[1]))
        for (_, shape, layout, why), alike in groups.items() if most is None else order[:most]:
            more = f" and {len(alike) - 1} alike" if len(alike) > 1 else ""
            held = size(sum(here for _, here in alike))
            table.add_row(*map(escape, (alike[0][0] + more, str(shape), layout, why, held)))
        rest = [here for _, alike in order[most:] for _, here in alike] if most else []
        if rest:
            table.add_row(f"{len(rest)} others", "", "", "", size(sum(rest)))
        table.caption = (
            f"{size(self.bytes_a_device)} of {size(self.total_bytes)} per device; "
            f"{self.divided:.0%} of the bytes belong to sharded variables"
        )
        return table

    def __str__(self) -> str:
        console = Console(width=10_000, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def describe_layout(model: keras.Model) -> ModelLayout:
    """Returns how much of each variable of a model one device holds.

    In a job, one worker alone may call this function, because no worker waits for another in it.
    Variables that do not exist yet, such as an optimizer's before the first step, are not listed.

    Example::

        strategy = kd.MirroredStrategy()  # or with sharding="full"
        with strategy.scope():
            model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])
        print(kd.describe_layout(model))

    Args:
        model: A built model, made in a strategy's scope or not.

    Raises:
        ValueError: If the model is not built.
    """
    keras_compat.require_built(model)
    return ModelLayout(model)
