"""What a device holds of a model."""

from __future__ import annotations

from typing import final

import keras
from rich.console import Console
from rich.table import Table

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import trainer_of
from kerasdist.core.sharding import size


@final
class ModelLayout:
    """Which part of each variable of a model a device holds; printed as a table.

    Attributes:
        rows: For each variable, those of the optimizer included: its path, its shape, how it is
            divided, and how many bytes of it a device holds.
        total_bytes: How many bytes the variables have.
        bytes_a_device: How many of them a device holds.
    """

    def __init__(self, model: keras.Model) -> None:
        """Asks the model's strategy; a model of no strategy is whole on its device."""
        trainer = trainer_of(model)
        optimizer = getattr(model, "optimizer", None)
        variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
        self.rows: list[tuple[str, tuple[int, ...], str, int]] = []
        self.total_bytes = self.bytes_a_device = divided = 0
        for variable in {id(one): one for one in variables}.values():
            shape = tuple(variable.shape)
            layout, held = trainer.replicas.held(variable) if trainer else ("whole", shape)
            here, there = (keras_compat.nbytes(variable, one) for one in (held, shape))
            self.rows.append((variable.path, shape, layout, here))
            self.total_bytes += there
            self.bytes_a_device += here
            divided += there if here < there else 0
        self.divided = divided / max(self.total_bytes, 1)

    def __str__(self) -> str:
        table = Table("variable", "shape", "layout")
        table.add_column("a device holds", justify="right")
        for path, shape, layout, here in self.rows:
            table.add_row(path, str(shape), layout, size(here))
        table.caption = (
            f"{size(self.bytes_a_device)} of {size(self.total_bytes)} a device; of the bytes "
            f"{self.divided:.0%} are of variables that devices divide"
        )
        console = Console(width=10_000, color_system=None)
        with console.capture() as capture:
            console.print(table)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def describe_layout(model: keras.Model) -> ModelLayout:
    """Returns which part of each variable a device holds, to be printed. No worker waits for it.

    Variables that do not exist yet, as those of an optimizer before the first step, are not in it.

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
    if not model.built:
        raise ValueError(
            f"Expected a built model. Received: model={model.name!r}, which has no variables yet. "
            "Give it an Input, call it once, or call model.build."
        )
    return ModelLayout(model)
