"""Builds the wheel, and tries it in clean environments: ``make wheels``.

    python -m tests.packaging.wheels [--backends jax torch] [--pythons 3.12]

For each Python that is found here and each backend: a fresh virtual environment, ``pip install
kerasdist[backend]`` from the wheel, ``kerasdist --version`` and ``info``, and README's snippet, in
a folder where the repository cannot be imported. It needs a package index, and some minutes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
BACKENDS = ("jax", "torch", "tensorflow")
PYTHONS = ("3.11", "3.12", "3.13")
WHEELS = ROOT / "build" / "wheels"
SECONDS = 1800


def snippet() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return next(block for block in blocks if "MirroredStrategy" in block)


def build(folder: Path) -> Path:
    code = f"import hatchling.build; print(hatchling.build.build_wheel({str(folder)!r}))"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / run([sys.executable, "-c", code], ROOT).split()[-1]


def interpreters(wanted: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for version in wanted:
        places = [*sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))]
        on_path = shutil.which(f"python{version}")
        for place in (*places, *([Path(on_path)] if on_path else [])):
            code = "import sys; print('%d.%d' % sys.version_info[:2])"
            asked = subprocess.run([place, "-c", code], capture_output=True, text=True, check=False)
            if asked.stdout.strip() == version:
                yield version, place
                break
        else:
            print(f"Python {version} is not here", flush=True)


def attempt(wheel: Path, python: Path, backend: str) -> str:
    """Installs the wheel in a fresh environment and runs the snippet; returns what it said."""
    with tempfile.TemporaryDirectory(prefix="kerasdist-wheel-") as name:
        folder = Path(name)
        run([python, "-m", "venv", folder / "venv"], folder)
        bin_folder = folder / "venv" / "bin"
        pip = [bin_folder / "python", "-m", "pip", "--disable-pip-version-check"]
        run([*pip, "install", "--quiet", f"kerasdist[{backend}] @ {wheel.as_uri()}"], folder)
        (folder / "train.py").write_text(snippet(), encoding="utf-8")
        version = run([bin_folder / "kerasdist", "--version"], folder).strip()
        run([bin_folder / "kerasdist", "info"], folder, {"KERAS_BACKEND": backend})
        said = run([bin_folder / "python", "train.py"], folder, {"KERAS_BACKEND": backend})
        if not re.search(r"\d replicas, loss \d", said):
            raise RuntimeError(f"the snippet has not trained: {said}")
        packages = run([*pip, "list", "--format=freeze"], folder).splitlines()
        shown = [one for one in packages if one.partition("==")[0] in ("keras", backend)]
        return ", ".join([version, *shown])


def run(command: Sequence[object], folder: Path, more: Mapping[str, str] | None = None) -> str:
    """Returns what a command prints; raises with its end if it fails."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KERAS_BACKEND")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**kept, **(more or {})},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stdout}{done.stderr}"[-20000:])
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--pythons", nargs="+", default=list(PYTHONS))
    options = parser.parse_args()
    wheel = build(WHEELS)
    print(f"built {wheel.relative_to(ROOT)}", flush=True)
    tried = failed = 0
    for version, python in interpreters(options.pythons):
        for backend in options.backends:
            began = time.monotonic()
            tried += 1
            try:
                said = attempt(wheel, python, backend)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed += 1
                said = f"FAILED: {error}"
            seconds = time.monotonic() - began
            print(f"Python {version}, {backend}, {seconds:.0f} s: {said}", flush=True)
    return int(failed > 0 or tried == 0)


if __name__ == "__main__":
    sys.exit(main())
