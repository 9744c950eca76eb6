"""The gallery's scripts run, in short, and say what they should; all of it is `make gallery`.

In `make test` a few run on PyTorch, in `make test-slow` one port is compared with its original. In
`make test-everything` each backend runs those that depend on it most. A process runs several
scripts, one after the other: its start takes as long as a script.
"""

import ast
import dataclasses
import functools
import json
import os
import re
import struct

import pytest

from examples import gallery
from tests import fresh
from tests.environment import PLAIN_DATA_PARALLEL, everything, path_of_users, values
from tests.fresh import ROOT

EXAMPLES = ROOT / "examples"
TIME_LIMIT_S = 600

pytestmark = pytest.mark.timeout(2 * TIME_LIMIT_S)

# Arguments of a short run, and the bounds of the number that the last line must have then.
SHORT = {
    "callbacks_and_tensorboard": ("--epochs 4", 0.7, 1),
    "contrastive_simclr": ("--epochs 1", 0.5, 1),
    "custom_train_step_vae": ("--epochs 2", 0, 120),
    "digits_cnn": ("--epochs 2", 0.2, 1),
    "digits_gan": ("--epochs 3", 0, 2e-3),
    "gpt_char_lm": ("--epochs 2 --pieces 512", 1, 40),
    "input_pipelines": ("--patches 1024", 0.45, 1),
    "large_batch_scaling": ("--epochs 4 --batches 128", 0.5, 1),
    "model_parallel": ("--epochs 1", 0, 1e-3),
    "multi_worker_fit": ("--epochs 3", 0.7, 1),
    "optuna_search": ("--trials 4 --epochs 3", 0.8, 1),
    "port_keras_distribution": ("", 0.85, 1),
    "port_tf_distribute_fit": ("", 0.8, 1),
    "port_tf_distribute_loop": ("", 0, 0.5),
    "port_torch_ddp": ("", 0.8, 1),
    "survive_preemption": ("--epochs 2", 0, 0),
    "tabular_mixed_features": ("--epochs 3", 0.9, 1),
    "text_transformer": ("--epochs 2", 0.4, 1),
    "train_then_serve": ("--epochs 2", 0, 1e-5),
    "transfer_and_lora": ("--epochs 5", 0.5, 1),
    "tune_a_preset": ("--epochs 1", 0, 5),
    # Guessing one of 16 numbers has 2.77.
    "transformer": (
        "--blocks 1 --width 32 --length 8 --vocabulary 16 --batch 16 --steps 8 --epochs 5",
        *(0, 2.4),
    ),
}
EVERYWHERE = ["digits_gan", "custom_train_step_vae", "transformer"]
ALONE = {
    "tensorflow": [
        *("transfer_and_lora", "callbacks_and_tensorboard", *EVERYWHERE),
        *("port_torch_ddp", "port_keras_distribution"),
    ],
    "jax": [
        *("gpt_char_lm", "contrastive_simclr", "text_transformer", *EVERYWHERE),
        *("port_tf_distribute_loop", "port_torch_ddp"),
    ],
    "torch": [
        *(*EVERYWHERE, "digits_cnn", "input_pipelines", "large_batch_scaling"),
        *("optuna_search", "survive_preemption", "tabular_mixed_features", "train_then_serve"),
        *("port_tf_distribute_fit", "port_tf_distribute_loop", "port_keras_distribution"),
        "port_torch_ddp",
    ],
}
if not everything():
    ALONE = {"torch": [*EVERYWHERE, "port_tf_distribute_loop", "port_torch_ddp"]}
# The backend that a port comes from, and what starts its original.
PORTS = {
    "port_tf_distribute_fit": ("tensorflow", ()),
    "port_tf_distribute_loop": ("tensorflow", ()),
    "port_torch_ddp": ("torch", ("-m", "torch.distributed.run", "--nproc-per-node", "2")),
    "port_keras_distribution": ("jax", ()),
}
# With other devices, as processes, and with several workers.
BY_ITSELF = [
    *(("model_parallel", "jax", "alone"), ("multi_worker_fit", "torch", "2 workers")),
    *(("tune_a_preset", "torch", "alone"), ("tune_a_preset", "jax", "2 workers")),
]

ONE_AFTER_THE_OTHER = """
import runpy, sys
import keras

for name, path, arguments in {scripts}:
    print("example", name, flush=True)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session()
"""


def run_python(*arguments, backend, **settings):
    """Runs what needs scikit-learn."""
    variables = {"KERAS_BACKEND": backend, "PYTHONPATH": path_of_users(), **settings}
    return fresh.run_python(*arguments, seconds=TIME_LIMIT_S, **variables)


def arguments(name):
    return SHORT[name][0].split()


def to_draw(name, folder):
    """The arguments of a short run that draws its figure."""
    return [*arguments(name), "--figure", str(folder / f"{name}.png")]


def check(name, output, folder=None):
    [example] = [one for one in gallery.GALLERY if one.name == name]
    short = dataclasses.replace(example, bounds=SHORT[name][1:])
    assert short.problem(gallery.last_line(output)) is None, output
    assert folder is None or size_of(folder / f"{name}.png") == (640, 400)


def size_of(png):
    """Returns the width and the height in pixels."""
    return struct.unpack(">II", png.read_bytes()[16:24])


def test_each_example_has_a_short_run():
    assert {*SHORT} == {example.name for example in gallery.GALLERY}
    if everything():
        assert {*SHORT} == {name for name, *_ in BY_ITSELF}.union(*ALONE.values())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the scripts of a backend print, one after the other; their figures are in a folder."""
    folder = tmp_path_factory.mktemp("figures")

    @functools.cache
    def outputs(backend):
        names = ALONE[backend]
        scripts = [(name, str(EXAMPLES / f"{name}.py"), to_draw(name, folder)) for name in names]
        code = ONE_AFTER_THE_OTHER.format(scripts=scripts)
        found = run_python("-c", code, backend=backend).split("example ")[1:]
        return folder, dict(zip(names, found, strict=True))

    return outputs


@pytest.mark.parametrize("backend", ALONE)
def test_examples_alone(backend, alone):
    """They run, and draw their figures."""
    folder, outputs = alone(backend)
    for name, output in outputs.items():
        check(name, output, folder)


@pytest.mark.parametrize(("name", "backend", "mode"), BY_ITSELF if everything() else BY_ITSELF[1:2])
def test_an_example_by_itself(name, backend, mode, tmp_path):
    script, drawn = EXAMPLES / f"{name}.py", to_draw(name, tmp_path)
    settings = {"TMPDIR": str(tmp_path)}  # where it writes
    if name == "tune_a_preset":
        settings["PYTHONPATH"] = os.pathsep.join([path_of_users(), str(gallery.PACKAGES)])
    output = run_python(*gallery.MODES[mode], script, *drawn, backend=backend, **settings)
    check(name, output, tmp_path)
    assert name != "tune_a_preset" or (tmp_path / "kerasdist_tuned/model.safetensors").exists()


def numbers(output):
    return [float(number) for number in re.findall(r"\d+\.\d{4}", output)]


@pytest.mark.parametrize("name", PORTS if everything() else ["port_torch_ddp"])
def test_a_port_prints_what_the_original_prints(name, alone):
    backend, launcher = PORTS[name]
    settings = values(PLAIN_DATA_PARALLEL) if name == "port_keras_distribution" else {}
    script = EXAMPLES / "before" / f"{name}.py"
    original = run_python(*launcher, script, backend=backend, **settings)
    ported = alone(backend)[1].get(name) or run_python(EXAMPLES / f"{name}.py", backend=backend)
    check(name, ported)
    assert len(numbers(original)) > 5
    # Some 140 steps of an optimizer in another order of additions; printed with four digits. An
    # accuracy may differ by one image of 389.
    assert numbers(ported) == pytest.approx(numbers(original), abs=3e-3)


def test_each_port_is_compared():
    assert {*PORTS} == {one.name for one in gallery.GALLERY if one.before.exists()}
    assert {*PORTS} == {path.stem for path in (EXAMPLES / "before").glob("*.py")}


def test_the_pages_are_those_of_the_scripts_and_of_what_is_recorded():
    for path, text in gallery.pages().items():
        assert path.read_text("utf-8") == text, f"{path}: call `make gallery-pages`"


@pytest.mark.parametrize("example", gallery.GALLERY, ids=lambda example: example.name)
def test_the_figure_of_an_example_fits_its_card(example):
    """Each has one, as large as the others, small as a file, and not transparent."""
    figure = example.figure.read_bytes()
    assert size_of(example.figure) == (640, 400)
    assert len(figure) < 40_000
    colours = figure[25]
    assert colours not in (4, 6)  # with an alpha channel
    assert b"tRNS" not in figure


@pytest.mark.parametrize("example", gallery.GALLERY, ids=lambda example: example.name)
def test_an_example_is_short_and_its_notebook_has_its_code(example):
    source = example.path.read_text("utf-8")
    assert len(source.splitlines()) <= 140  # some 20 of them draw its figure
    code = source.splitlines(keepends=True)[ast.parse(source).body[0].end_lineno :]
    notebook = json.loads((gallery.PAGES / f"{example.name}.ipynb").read_text("utf-8"))
    _, *cells = ["".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == "code"]
    assert "".join("".join(cells).split()) == "".join("".join(code).split())
