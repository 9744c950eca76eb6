"""The gathers of sharded weights and the layers' computations in one step, as a timeline.

    KERAS_BACKEND=torch python benchmarks/timeline.py [--workers 2] [--layers 5] [--late 0.05]

Over a Gloo that is late: an all-gather is done so many seconds after its start, as on a slow
network, and meanwhile a layer computes as long. A `*` is a gather on its way. At the end stands how
long the gathers were on their way, and how long the worker has waited for them; without overlap it
would be the same.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch

import kerasdist as kd
from kerasdist.backends.torch.workers.process_group import ProcessGroup


@dataclass(frozen=True)
class Event:
    """What has happened, and when."""

    what: str
    seconds: float

    def __str__(self) -> str:
        return self.what


class Timeline:
    """The events of a step. No list: of one that a layer holds, Keras makes another."""

    def __init__(self):
        self.events = []

    def note(self, what):
        self.events.append(Event(what, time.perf_counter()))


class LateGather:
    """An all-gather that is done some seconds after its start, and no sooner than Gloo's own."""

    def __init__(self, work, number, timeline, seconds):
        self._work, self._number, self._timeline = work, number, timeline
        self._done = time.perf_counter() + seconds
        timeline.note(f"gather {number} starts")

    def wait(self):
        self._timeline.note(f"gather {self._number} is needed")
        self._work.wait()
        time.sleep(max(0.0, self._done - time.perf_counter()))
        self._timeline.note(f"gather {self._number} is there")


class Computing(torch.autograd.Function):
    """Takes some seconds forward and backward, and notes their ends."""

    @staticmethod
    def forward(ctx, inputs, number, timeline, seconds):
        ctx.facts = number, timeline, seconds
        time.sleep(seconds)
        timeline.note(f"layer {number} computed")
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        number, timeline, seconds = ctx.facts
        time.sleep(seconds)
        timeline.note(f"layer {number} differentiated")
        return gradient, None, None, None


class Layer(keras.layers.Dense):
    """A layer that computes for some seconds."""

    def __init__(self, number, timeline, seconds, *args):
        super().__init__(*args)
        self._facts = number, timeline, seconds

    def call(self, inputs):
        outputs = super().call(inputs)
        return outputs if inputs.is_meta else Computing.apply(outputs, *self._facts)


def recorded(strategy, layers, width, seconds):
    """The events of the third step of a model of equal layers, each a group of its own."""
    timeline = Timeline()
    x = np.ones((8, width), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((width,))])
        for number in range(layers):
            model.add(Layer(number, timeline, seconds, width, "tanh"))
        model.compile("sgd", "mse")
    model.fit(x, x, batch_size=8, epochs=2, verbose=0)
    start, started = ProcessGroup.start_gather_of_parts, []

    def start_late(group, part):
        work, whole = start(group, part)
        started.append(LateGather(work, len(started), timeline, seconds))
        return started[-1], whole

    timeline.events.clear()
    with mock.patch.object(ProcessGroup, "start_gather_of_parts", start_late):
        model.fit(x, x, batch_size=8, verbose=0)
    return timeline.events


def shown(events):
    """Lines of a timeline, with the gathers that are on their way, and the seconds waited."""
    under_way, begun, lines = set(), {}, []
    on_their_way = waited = 0.0
    for event in events:
        kind, number, what = event.what.split(" ", 2)
        if what == "starts":
            under_way.add(number)
        if kind == "gather":
            begun[number, what] = event.seconds
        if what == "is there":
            under_way.discard(number)
            on_their_way += event.seconds - begun[number, "starts"]
            waited += event.seconds - begun[number, "is needed"]
        at = 1e3 * (event.seconds - events[0].seconds)
        lines.append(f"{at:8.1f} ms  {'*' * len(under_way):3} {event}")
    share = waited / on_their_way
    lines.append(
        f"gathers on their way {on_their_way:.3f} s, waited for {waited:.3f} s ({share:.0%})"
    )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--late", type=float, default=0.05, help="seconds")
    arguments = parser.parse_args()

    def measured():
        strategy = kd.MultiWorkerMirroredStrategy(
            devices=["cpu:0"],
            sharding=kd.Sharding("full", min_size=1),
            communication_options=kd.CommunicationOptions(bytes_per_pack=8),
        )
        return shown(recorded(strategy, arguments.layers, 64, arguments.late))

    print("\n".join(kd.launch(measured, workers=arguments.workers)))


if __name__ == "__main__":
    main()
