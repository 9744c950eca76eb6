"""By hand on PyTorch: DistributedDataParallel around the Keras model, and around an equal module.

For sharded state ZeroRedundancyOptimizer beside it, or FSDP2 (``fully_shard``) in its place. Loss
and optimizer are PyTorch's, as in https://keras.io/guides/distributed_training_with_torch/.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import networks
import torch
from networks import BLOCKS, CLASSES, DROPOUT, HEADS, SEQUENCE, STAGES, VOCABULARY, WIDTH, Task
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from loops import Place


def keras_module(task: Task, place: Place):
    """The Keras model under DDP, with PyTorch's optimizer."""
    module = task.model()
    update = torch.optim.Adam(module.parameters()).step
    return _loop(task, place, _replicated(module, place), update, training=True)


def keras_fit(task: Task, place: Place):
    """Keras's own `fit`, which puts DDP around the model from Keras 3.16 on."""
    _connect(place)
    model = task.model()
    model.compile("adam", task.loss())
    x, y = task.data()
    rows = [range(len(x))[own] for own in place.rows_of(task)]
    own = [row for batch in rows for row in batch]
    x, y = x[own], y[own]

    def work():
        history = model.fit(x, y, batch_size=len(rows[0]), shuffle=False, verbose=0)
        return history.history["loss"][-1]

    return work


def on_one_device(task: Task, kind: str):
    """The Keras model alone, with PyTorch's optimizer, on a device of a kind."""
    module = task.model()
    update = torch.optim.Adam(module.parameters()).step
    device = torch.device("cuda" if kind == "gpu" else "cpu")
    return _loop(task, Place(0, 1, ()), module, update, device=device, training=True)


def keras_optimizer(task: Task, place: Place):
    """The Keras model under DDP, with its own optimizer."""
    import keras

    module = task.model()
    variables = module.trainable_variables
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)

    @torch.no_grad()
    def step():
        optimizer.apply([variable.value.grad for variable in variables], variables)

    return _loop(task, place, _replicated(module, place), step, training=True)


def plain_module(task: Task, place: Place):
    """An equal module of PyTorch's under DDP."""
    module = MODULES[task.name]()
    update = torch.optim.Adam(module.parameters()).step
    return _loop(task, place, _replicated(module, place), update)


def sharded_optimizer(task: Task, place: Place):
    """The Keras model under DDP, with an optimizer whose state the workers divide."""
    module = task.model()
    replicated = _replicated(module, place)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam)
    return _loop(task, place, replicated, optimizer.step, training=True)


def sharded_keras_module(task: Task, place: Place):
    """The layers of a Keras model, a Sequential one, under FSDP2."""
    layers = nn.Sequential(*map(_Layer, task.model().layers))
    return _fully_sharded(task, place, layers)


def sharded_plain_module(task: Task, place: Place):
    """An equal module of PyTorch's under FSDP2."""
    return _fully_sharded(task, place, MODULES[task.name]())


class _Layer(nn.Module):
    """A Keras layer whose variables take the tensors that FSDP2 gathers."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.parameters_of_layer = layer.torch_params

    def forward(self, *args: Any) -> Any:
        for variable in self.layer.variables:
            variable._value = self.parameters_of_layer[variable.path]
        return self.layer(*args)


def _fully_sharded(task: Task, place: Place, module: nn.Module):
    _connect(place)
    mesh = init_device_mesh("cpu", (place.workers,))
    for block in module.children():
        if any(True for _ in block.parameters()):
            fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return _loop(task, place, module, torch.optim.Adam(module.parameters()).step)


def _replicated(module: nn.Module, place: Place) -> nn.Module:
    _connect(place)
    return nn.parallel.DistributedDataParallel(module)


def _connect(place: Place) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://localhost:{place.ports[0]}",
        rank=place.rank,
        world_size=place.workers,
    )


def _loop(
    task: Task,
    place: Place,
    model: nn.Module,
    update: Callable[[], None],
    device: torch.device | None = None,
    **call: bool,
):
    loss_of = nn.MSELoss() if task.is_regression else _entropy
    x, y = map(torch.from_numpy, task.data())
    if isinstance(getattr(model, "module", None), Cnn):
        x = x.permute(0, 3, 1, 2).contiguous()
    if not task.is_regression:
        y = y.long()
    batches = [(x[rows], y[rows]) for rows in place.rows_of(task)]

    def work():
        for inputs, labels in batches:
            model.zero_grad()
            loss = loss_of(model(inputs.to(device), **call), labels.to(device))
            loss.backward()
            update()
        return loss.item()

    return work


def _entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Dense(nn.Sequential):
    def __init__(self, widths: tuple[int, ...]) -> None:
        layers = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers[:-1])


class Block(nn.Module):
    def __init__(self, inputs: int, filters: int) -> None:
        super().__init__()
        strides = 1 if filters == STAGES[0] else 2
        self.first = _convolution(inputs, filters, strides)
        self.second = _convolution(filters, filters)
        self.shortcut = (
            nn.Identity() if strides == 1 else _convolution(inputs, filters, strides, size=1)
        )

    def forward(self, x):
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, strides: int = 1, size: int = 3) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, size, strides, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Cnn(nn.Sequential):
    def __init__(self) -> None:
        widths = zip((STAGES[0], *STAGES), STAGES, strict=False)
        super().__init__(
            _convolution(networks.IMAGE[-1], STAGES[0]),
            nn.ReLU(),
            *(Block(inputs, filters) for inputs, filters in widths),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(STAGES[-1], CLASSES),
        )


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_thought = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.dropout = nn.Dropout(DROPOUT)
        self.thought = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(DROPOUT),
        )

    def forward(self, x):
        seen = self.before_attention(x)
        x = x + self.dropout(self.attention(seen, seen, seen, need_weights=False)[0])
        return x + self.thought(self.before_thought(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(SEQUENCE, WIDTH))
        blocks = [TransformerBlock() for _ in range(BLOCKS)]
        self.rest = nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, x):
        return self.rest(self.embedding(x) + self.positions)


MODULES = {
    "tiny": partial(Dense, networks.TINY_WIDTHS),
    "mlp": partial(Dense, networks.MLP_WIDTHS),
    "cnn": Cnn,
    "transformer": Transformer,
}
