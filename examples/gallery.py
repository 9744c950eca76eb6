"""Run the gallery's scripts on every backend, and write its pages from what they print.

`make gallery` does both, for all of it:

    python examples/gallery.py run                              # alone, and with two workers
    python examples/gallery.py run digits_gan --backend torch   # a part; the rest stays as recorded
    python examples/gallery.py pages                            # README.md and docs/gallery

What a run prints is kept in `recorded.json`, beside the time it took.
"""

import argparse
import ast
import difflib
import importlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parent
PAGES = EXAMPLES.parent / "docs" / "gallery"
RECORDED = EXAMPLES / "recorded.json"
BACKENDS = ("tensorflow", "jax", "torch")
MODES = {"alone": [], "2 workers": ["-m", "kerasdist", "run", "--workers", "2"]}
PACKAGES = Path(sys.prefix) / "keras-hub"  # KerasHub, beside the locked packages
TIMEOUT_S = 300
FIGURE = "\n# A figure of the result.\n"  # where a port's figure begins


@dataclass(frozen=True)
class Example:
    """An entry of gallery.toml, which says what each field means."""

    name: str
    shows: str
    data: str
    words: str
    bounds: Sequence[float]
    arguments: Sequence[str] = ()
    backends: Sequence[str] = BACKENDS
    modes: Sequence[str] = tuple(MODES)

    @property
    def path(self) -> Path:
        """Where the script is."""
        return EXAMPLES / f"{self.name}.py"

    @property
    def figure(self) -> Path:
        """Where its figure is, for the site."""
        return PAGES / f"{self.name}.png"

    @property
    def before(self) -> Path:
        """Where the script is from which this one was ported, if it was."""
        return EXAMPLES / "before" / self.path.name

    def documentation(self) -> tuple[str, str]:
        """The first line of its docstring, and the others."""
        text = ast.get_docstring(ast.parse(self.path.read_text("utf-8"))) or ""
        title, _, rest = text.partition("\n")
        return title.rstrip("."), rest.strip()

    def problem(self, last_line: str) -> str | None:
        """Return what is wrong with its last line (a NaN is)."""
        found = re.search(rf"{self.words} (nan|[\d.e+-]+)", last_line)
        if found is None:
            return f"expected a number behind {self.words!r}"
        least, most = self.bounds
        if not least <= float(found[1].rstrip(".")) <= most:
            return f"expected {self.words} from {least} to {most}"
        return None


_ENTRIES = tomllib.loads((EXAMPLES / "gallery.toml").read_text("utf-8"))
GALLERY = [Example(name, **entry) for name, entry in _ENTRIES.items()]


@dataclass(frozen=True)
class Run:
    """One script on one backend, alone or as several workers."""

    example: Example
    backend: str
    mode: str

    @property
    def key(self) -> str:
        """Its name among the recorded runs of the example."""
        return f"{self.backend}, {self.mode}"

    @property
    def draws(self) -> bool:
        """Whether the figure is of this run."""
        return (self.backend, self.mode) == ("jax", "alone")

    def do(self) -> tuple[dict[str, Any], str | None]:
        """Run it; return what to record, and what is wrong with it."""
        options = ["--figure", str(self.example.figure)] if self.draws else []
        paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(PACKAGES)]))
        settings = {"KERAS_BACKEND": self.backend, "PYTHONPATH": paths}
        start = time.perf_counter()
        try:
            child = subprocess.run(
                [
                    *(sys.executable, *MODES[self.mode], str(self.example.path)),
                    *(*self.example.arguments, *options),
                ],
                env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **settings},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {}, f"no end after {TIMEOUT_S} s"
        seconds = round(time.perf_counter() - start, 1)
        if child.returncode:
            return {}, f"exit status {child.returncode}\n{child.stdout}{child.stderr}"
        record = {"seconds": seconds, "output": child.stdout.rstrip()}
        return record, self.example.problem(last_line(record["output"]))


def last_line(output: str) -> str:
    """Return the last line that a script printed; of several workers, that of the first."""
    lines = output.splitlines() or [""]
    prefix = "[worker 0/2] "
    return next((x.removeprefix(prefix) for x in lines[::-1] if x.startswith(prefix)), lines[-1])


def recorded() -> dict[str, dict[str, Any]]:
    """Return the recorded runs of each example."""
    return json.loads(RECORDED.read_text("utf-8")) if RECORDED.exists() else {}


def run(examples: list[Example], backends: list[str], modes: list[str]) -> int:
    """Run scripts, record what they print, print a table; return how many have failed."""
    console, table, failures = Console(width=160), Table(title="The gallery"), 0
    for heading in ("example", "backend", "mode", "seconds", "last line"):
        table.add_column(heading)
    PAGES.mkdir(exist_ok=True)
    for one in (
        Run(example, backend, mode)
        for example in examples
        for backend in backends
        for mode in modes
        if backend in example.backends and mode in example.modes
    ):
        record, problem = one.do()
        line = last_line(record.get("output", ""))
        row = (one.example.name, one.backend, one.mode, str(record.get("seconds", "")))
        console.print(*row, line, markup=False, highlight=False)
        if one.draws:
            make_small(one.example.figure)
        if problem:
            failures += 1
            console.print(f"FAILED: {problem}", markup=False, highlight=False)
            table.add_row(*row, f"failed: {problem.splitlines()[0]}", style="red")
            continue
        table.add_row(*row, line)
        records = recorded()
        records.setdefault(one.example.name, {})[one.key] = record
        RECORDED.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", "utf-8")
    console.print(table)
    return failures


def make_small(figure: Path) -> None:
    """Reduce a figure to 64 colours, if it was drawn."""
    from PIL import Image  # of matplotlib, which has drawn it

    if figure.exists():
        few = Image.open(figure).convert("RGB").quantize(64)
        few.save(figure, optimize=True)


def seconds(runs: dict[str, Any], mode: str) -> str:
    """Return the times of one mode on all backends, for a cell of a table."""
    found = [runs.get(f"{backend}, {mode}", {}).get("seconds") for backend in BACKENDS]
    return " / ".join("-" if one is None else f"{one:.0f}" for one in found)


def table() -> str:
    """Return the table of all examples, for GitHub."""
    lines = ["| script | what it shows | data |", "|---|---|---|"]
    for example in GALLERY:
        link = f"[{example.name}]({example.path.name})"
        lines.append(f"| {link} | {example.shows} | {example.data} |")
    return "\n".join(lines)


def cards() -> str:
    """Return a card for each example, with the figure that it draws, for the site."""
    made = []
    for example in GALLERY:
        name = example.name
        picture = f"[![What {name} draws]({name}.png){{ loading=lazy }}]({name}.md)"
        link = f"**[{example.documentation()[0]}]({name}.md)**"
        source = f"`{name}.py`, data: {example.data}"
        made.append("-   " + "\n\n    ".join((picture, link, example.shows, source)))
    return '<div class="grid cards" markdown>\n\n' + "\n\n".join(made) + "\n\n</div>"


def shown(runs: dict[str, Any], mode: str) -> tuple[str, str]:
    """Return the backend of the run that the pages show, and its output; JAX's if there is one."""
    for backend in ("jax", "torch", "tensorflow"):
        if record := runs.get(f"{backend}, {mode}"):
            return backend, record["output"]
    return "", ""


INDEX = """{head}# {title}

Each script is complete: standard Keras, and the few lines that kerasdist needs. A script runs on
any backend, in one process or as several workers, even on a laptop without accelerators. There are
two exceptions: model_parallel needs JAX and a single process, and tune_a_preset needs KerasHub, and
JAX or PyTorch. With `--figure FILE.png` each script draws its result.

```sh
KERAS_BACKEND=jax python examples/digits_cnn.py
kerasdist run --workers 2 examples/digits_cnn.py
```

{examples}

{more}"""

HIDE = """---
hide:
  - toc
---
"""

SECONDS = """Each page says how many seconds its script takes, from the start of Python to its end,
on two cores that other programs used, too. The CPU devices and workers share these cores, so more
devices or workers are no faster. `-` means that the script was not run. The output and the figure
are those of JAX, if the script was run there. `make gallery` runs all scripts and writes the pages.
"""

MORE = """
This folder also has [demo.py](demo.py), which `make demo` runs;
[track_experiments.py](track_experiments.py), which logs to Weights & Biases and MLflow if they
are installed; [before/](before), the scripts from which the ports were made; and
[gallery.py](gallery.py), which runs the gallery and writes its pages.
"""


def page(example: Example) -> str:
    """Return the page of an example: what it says of itself, what it prints, its code."""
    title, rest = example.documentation()
    parts = [f"# {title}", rest, f"[Download as a notebook]({example.name}.ipynb)"]
    parts += [f"![What `--figure` draws]({example.name}.png)"]
    if example.arguments:
        parts += [f"Here with `{' '.join(example.arguments)}`."]
    runs = recorded().get(example.name, {})
    command = f"examples/{example.name}.py"
    parts += [
        f"Seconds on TensorFlow / JAX / PyTorch: {seconds(runs, 'alone')} alone, "
        f"{seconds(runs, '2 workers')} with two workers."
    ]
    for mode, start in (("alone", "python"), ("2 workers", "kerasdist run --workers 2")):
        backend, output = shown(runs, mode)
        if output:
            called = f"$ KERAS_BACKEND={backend} {start} {command}"
            parts += [f"## Output, {mode}", f"```text\n{called}\n{output}\n```"]
    if example.before.exists():
        parts += ["## Before, and what changed", f"```diff\n{difference(example)}```"]
        parts += [f'```python\n--8<-- "examples/before/{example.name}.py"\n```']
    parts += ["## Code", f'```python\n--8<-- "{command}"\n```']
    return "\n\n".join(parts) + "\n"


def difference(example: Example) -> str:
    """Return what a port changes, its figure left out, in the format of `diff -u`."""
    before, after = (
        code(path)
        .partition(FIGURE)[0]
        .removeprefix("import argparse\n\n")
        .splitlines(keepends=True)
        for path in (example.before, example.path)
    )
    return "".join(difflib.unified_diff(before, after, "before", "after"))


def code(path: Path) -> str:
    """Return a script without its docstring."""
    source = path.read_text("utf-8")
    end = ast.parse(source).body[0].end_lineno
    return "".join(source.splitlines(keepends=True)[end:]).lstrip()


def notebook(example: Example) -> str:
    """Return an example as a Jupyter notebook."""
    try:
        jupytext = importlib.import_module("jupytext")
    except ImportError as error:
        raise SystemExit("Notebooks need jupytext: pip install jupytext") from error
    made = jupytext.reads(code(example.path), fmt="py:light")
    title, rest = example.documentation()
    start = (
        "import os\nimport sys\n\n"
        'os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported\n'
        f"sys.argv = {['notebook', *example.arguments]}  # the script's arguments"
    )
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": f"# {title}\n\n{rest}"},
        {"cell_type": "code", "metadata": {}, "source": start, "outputs": []},
        *({**cell, "metadata": {}} for cell in made.cells),
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # else drawn by chance
        if cell["cell_type"] == "code":
            cell.update(execution_count=None)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1) + "\n"


def pages() -> dict[Path, str]:
    """Return the pages by their paths."""
    made = {
        EXAMPLES / "README.md": INDEX.format(
            head="", title="Examples", examples=table(), more=SECONDS + MORE
        ),
        PAGES / "index.md": INDEX.format(
            head=HIDE, title="Gallery", examples=cards(), more=SECONDS
        ),
    }
    return made | {PAGES / f"{example.name}.md": page(example) for example in GALLERY}


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description="The gallery of examples.")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run scripts, and record what they print")
    by_name = {example.name: example for example in GALLERY}
    runs.add_argument("names", nargs="*", metavar="NAME", help=", ".join(by_name))
    runs.add_argument("--backend", choices=BACKENDS, nargs="+", default=list(BACKENDS))
    runs.add_argument("--mode", choices=list(MODES), nargs="+", default=list(MODES))
    commands.add_parser("pages", help="write the pages from what is recorded")
    options = parser.parse_args()
    if options.command == "run":
        if unknown := set(options.names) - set(by_name):
            parser.error(f"expected some of {', '.join(by_name)}. Received: {sorted(unknown)}")
        names = options.names or list(by_name)
        failures = run([by_name[name] for name in names], options.backend, options.mode)
        return 1 if failures else 0
    for path, text in pages().items():
        path.write_text(text, "utf-8")
    for example in GALLERY:
        (PAGES / f"{example.name}.ipynb").write_text(notebook(example), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
