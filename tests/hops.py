"""Counts the functions of the package that `fit` calls on two replicas, and the patches of Keras.

KERAS_BACKEND=torch KERASDIST_CPU_DEVICES=2 KERASDIST_CHECK=off python -m tests.hops
"""

import json
import sys
import threading
from collections import Counter
from pathlib import Path

import keras
import numpy as np

import kerasdist as kd
from kerasdist import keras_compat

PACKAGE = str(Path(kd.__file__).parent)
ROWS = 64


def main():
    seen: Counter[tuple[str, str]] = Counter()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            seen[code.co_filename, code.co_qualname] += 1

    x = np.random.default_rng(0).normal(size=(20 * ROWS, 32)).astype("float32")
    with kd.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential(
            [
                keras.Input((32,)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"])
    counts = []
    threading.setprofile(note)  # the replicas' threads begin in the first `fit`
    sys.setprofile(note)
    for steps in (1, 20, 10):
        seen.clear()
        model.fit(x[: steps * ROWS], x[: steps * ROWS, :1], batch_size=ROWS, verbose=0)
        counts.append(seen.copy())
    sys.setprofile(None)
    first, long, short = counts
    figures = {
        "calls in a step": round((long - short).total() / 10),
        "functions of a first fit": len(first),
        "their files": len({file for file, _ in first}),
        "patches of Keras": len(keras_compat.patched()),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
