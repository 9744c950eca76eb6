"""Runs the blocks of all pages that run on one backend, page after page, in this process.

The page "examples" has those in docstrings, of which each begins anew.

    KERAS_BACKEND=torch KERASDIST_CPU_DEVICES=2 python -m tests.docs [PAGE...]

Prints a line of JSON for each page: how many blocks ran, and the error of the one that failed.
"""

import contextlib
import importlib.util
import io
import json
import linecache
import os
import re
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

from tests import environment
from tests.docs.blocks import Block, blocks_of, examples, pages

MARK = "docs-page "
EXAMPLES = "examples"
HAS_HUB = importlib.util.find_spec("keras_hub") is not None
# Printed with three or four digits, after sums in another order.
TOLERANCE = 2e-3


def names_of_a_reader() -> dict[str, Any]:
    """What the pages take for granted: the imports, data, and a model under a strategy."""
    import keras
    import numpy as np

    import kerasdist as kd

    keras.utils.set_random_seed(0)
    draw = np.random.default_rng(0)
    x, x_test = draw.normal(size=(2, 64, 8)).astype("float32")

    def build_model() -> keras.Model:
        return keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
        )

    strategy = kd.MirroredStrategy()
    with strategy.scope():
        model = build_model()
        model.compile(optimizer="adam", loss="mse")

    return {
        **(names_beside_keras_hub(strategy) if HAS_HUB else {}),
        "__name__": "__main__",
        "keras": keras,
        "np": np,
        "kd": kd,
        "build_model": build_model,
        "strategy": strategy,
        "model": model,
        "x": x,
        "y": x[:, :1] + x[:, 1:2],
        "x_test": x_test,
        "y_test": x_test[:, :1],
    }


def names_beside_keras_hub(strategy: Any) -> dict[str, Any]:
    """KerasHub, the folder `my_preset` with a small Gemma, and texts."""
    import keras_hub

    from examples import tune_a_preset

    tune_a_preset.make_preset("my_preset", strategy, epochs=1)
    return {"keras_hub": keras_hub, "data": ["What a small Gemma reads."] * 8}


def run(block: Block, text: str, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    text = "\n" * (block.line - 1) + text
    # Where Python, and with it AutoGraph of TensorFlow, looks for the source of a function.
    linecache.cache[f"<{block.page}>"] = (len(text), None, text.splitlines(True), block.page)
    code = compile(text, f"<{block.page}>", "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


@contextlib.contextmanager
def process_of_torchrun() -> Iterator[None]:
    """The variables of a job of one process, for scripts that torchrun starts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with environment.variables(**job, MASTER_PORT=port):
        yield


def require_same(block: Block, shown: str, printed: str):
    """Fails unless both texts are the same but for their numbers, and these nearly."""
    number = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
    one, other = (list(map(float, number.findall(text))) for text in (shown, printed))
    same = number.sub("#", shown).split() == number.sub("#", printed).split()
    close = all(abs(a - b) < TOLERANCE for a, b in zip(one, other, strict=False))
    if not (same and close):
        raise AssertionError(f"{block.place}: expected {shown!r}, printed {printed!r}")


def run_both(block: Block, names: dict[str, Any]):
    """Runs the two scripts of a diff; they print the same, if they print anything."""
    import keras

    after = run(block, block.after, dict(names))
    if "before not run" in block.marks:
        return
    with process_of_torchrun():
        before = run(block, block.before, dict(names))
    keras.distribution.set_distribution(None)
    require_same(block, before, after)


def run_blocks(page: str, backend: str) -> Iterator[Block]:
    """Runs the blocks of a page, and yields each block before it runs."""
    names: dict[str, Any] = {}
    printed = None
    for block in blocks_of(page):
        if backend in [*block.backends, *(block.with_keras_hub if HAS_HUB else ())]:
            names = names or names_of_a_reader()
            yield block
            if block.language == "diff":
                run_both(block, names)
            else:
                printed = run(block, block.text, names)
        elif block.language == "console" and printed is not None:
            yield block
            lines = [line for line in block.text.splitlines() if not line.startswith("$ ")]
            require_same(block, "\n".join(lines), printed)


def run_examples(backend: str) -> Iterator[Block]:
    """Runs the examples of docstrings, yields each before it runs."""
    names = names_of_a_reader()
    for block in examples():
        if backend in block.backends:
            yield block
            run(block, block.text, dict(names))


def run_page(page: str, backend: str) -> dict[str, Any]:
    place, count = "before the first block", 0
    try:
        for block in run_examples(backend) if page == EXAMPLES else run_blocks(page, backend):
            place, count = block.place, count + 1
    except BaseException:  # noqa: BLE001 (also SystemExit: the other pages still run)
        return {"page": page, "blocks": count, "error": f"{place}\n{traceback.format_exc()}"}
    return {"page": page, "blocks": count, "error": None}


def main(*chosen: str):
    backend = os.environ["KERAS_BACKEND"]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for page in chosen or (*pages(), EXAMPLES):
            print(MARK + json.dumps(run_page(page, backend)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
