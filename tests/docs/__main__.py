"""Runs the blocks of all pages that run on one backend, page after page, in this process.

    KERAS_BACKEND=jax python -m tests.docs [PAGE...]

Prints a line of JSON for each page: what its blocks printed, or where one failed.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import traceback
from typing import Any

from tests.docs.blocks import ROOT, Block, blocks_of, pages

MARK = "docs-page "


def names_of_a_reader() -> dict[str, Any]:
    """What the pages take for granted: the imports, data and a function that builds a model."""
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

    return {
        "__name__": "__main__",
        **{"keras": keras, "np": np, "kd": kd, "build_model": build_model},
        **{"x": x, "y": x[:, :1] + x[:, 1:2], "x_test": x_test, "y_test": x_test[:, :1]},
    }


def run(block: Block, text: str, names: dict[str, Any]) -> str:
    """Runs a script of a block; returns what it prints."""
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + text, str(ROOT / block.page), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def numbers(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", printed)]


def run_both(block: Block, names: dict[str, Any]):
    """Runs the two scripts of a diff; they print the same numbers, if they print any."""
    after = numbers(run(block, block.after, dict(names)))
    if "before not run" not in block.marks:
        before = numbers(run(block, block.before, dict(names)))
        close = [abs(one - other) < 2e-3 for one, other in zip(before, after, strict=False)]
        assert len(before) == len(after), f"{block.place}: printed {before} before, {after} after"
        assert all(close), f"{block.place}: printed {before} before, {after} after"


def run_page(page: str, backend: str) -> dict[str, Any]:
    """Runs the blocks of a page; returns how many there were, and the error of the one that failed."""
    found = [block for block in blocks_of(page) if backend in block.backends]
    names = names_of_a_reader() if found else {}
    for block in found:
        try:
            if block.language == "diff":
                run_both(block, names)
            else:
                run(block, block.text, names)
        except BaseException:
            return {"page": page, "error": f"{block.place}\n{traceback.format_exc()}"}
    return {"page": page, "blocks": len(found), "error": None}


def main(*chosen: str):
    backend = os.environ["KERAS_BACKEND"]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for page in chosen or pages():
            print(MARK + json.dumps(run_page(page, backend)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
