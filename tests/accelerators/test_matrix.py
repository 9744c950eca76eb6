"""The configurations for accelerators name what exists, and each case is in one part."""

import dataclasses
import json
import shlex

import pytest

from benchmarks import gpu_smoke
from tests.accelerators import on_gpu
from tests.accelerators.matrix import EXACT, ROWS
from tests.conformance import registry
from tests.docs.test_commands import parse
from tests.environment import CPU_DEVICES, values
from tests.fresh import ROOT, run_python
from tests.multiprocess import layouts

SUITES = {
    "tests.conformance.runner": registry.CONFORMANCE,
    "tests.facade": "tests.facade",
    "tests.sharded": "tests.sharded",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_command_parses_and_names_what_exists(row):
    command = row.command.format(device="gpu", hosts="h1:4,h2:4")
    flag, module, *rest = shlex.split(command)
    if flag == on_gpu.SMOKE:
        options = gpu_smoke.parser().parse_args([module, *rest])
        assert options.backends == [row.backend]
        for pattern in options.parts:
            assert gpu_smoke.names(row.backend, [pattern])
        return
    assert flag == "-m"
    if module == "kerasdist":
        assert rest[rest.index("--backend") + 1] == row.backend
        parse(rest)
        return
    backend, *patterns = rest
    assert backend == row.backend
    if module == "tests.multiprocess":
        option, layout, *patterns = patterns
        layout = layouts.Layout.of(layout)
        assert (option, layout.replicas) == ("--layout", row.devices)
        known = list(layouts.keys(backend, layout))
    else:
        known = registry.load(SUITES[module])
    assert all(any(one in key for key in known) for one in patterns)


def test_each_case_of_the_exactness_suite_is_in_one_part():
    few = [name for name, case in registry.load().items() if min(case.replicas) <= 2]
    for name in few:
        parts = [
            part for part, themes in EXACT.items() if any(one in name for one in themes.split())
        ]
        assert len(parts) == 1, f"{name}: {parts}"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('fine')", "good: torch.1.numbers"),
        (
            "print('what it said'); raise SystemExit(3)",
            "===== torch.1.numbers: exit status 3 =====\nwhat it said\n",
        ),
        ("import time; time.sleep(100)", "took more than 2 s: torch.1.numbers"),
    ],
)
def test_a_part_ends_in_time_and_leaves_a_log(monkeypatch, tmp_path, capsys, code, said):
    row = next(row for row in ROWS if row.name == "torch.1.numbers")
    changed = dataclasses.replace(row, command=f"-c {shlex.quote(code)}")
    monkeypatch.setattr(on_gpu, "ROWS", (changed,))
    monkeypatch.setattr(on_gpu, "probe", lambda *_: {"ok": True, "devices": ["cpu:0"]})
    monkeypatch.setattr(on_gpu, "SECONDS", 2.0)
    status = on_gpu.main(["--device", "cpu", "--logs", str(tmp_path)])
    assert said in capsys.readouterr().out
    assert status == ("good" not in said)
    assert (tmp_path / "torch.1.numbers.log").exists()


def test_without_a_gpu_lines_say_that_nothing_ran(monkeypatch, tmp_path, capsys):
    for name, value in values(CPU_DEVICES).items():
        monkeypatch.setenv(name, value)
    assert on_gpu.main(["--only", "torch.1.numbers", "--logs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "torch: torch sees no GPU: nothing ran",
        "left out: torch.1.numbers: torch has no device here",
        "0 parts ran, 0 failed.",
    ]


def test_what_needs_more_devices_or_a_pod_is_left_out():
    row = {row.name: row for row in ROWS}
    assert on_gpu.left_out(row["torch.2.test"], 1, None) == "it needs 2 devices, there are 1"
    assert on_gpu.left_out(row["jax.pod.test"], 8, None) == "it needs a pod: --hosts h1:4,h2:4"


def test_a_part_of_gpu_smoke_gives_one_line_of_json():
    options = ("--device", "cpu", "--backends", "torch", "--parts", "correctness.mlp")
    said = run_python(on_gpu.SMOKE, *options, PYTHONPATH=str(ROOT))
    device, mlp = map(json.loads, said.splitlines())
    assert (device["part"], device["devices"]) == ("device", ["cpu:0"])
    assert mlp["ok"]
    assert mlp["largest difference"] == {"one device": 0.0, "mirrored": 0.0}


def test_a_missing_framework_is_left_out_by_name():
    """A Python that has torch and JAX, but no TensorFlow."""
    code = f"""
import importlib.util as util, runpy, sys
found = util.find_spec
util.find_spec = lambda name, *of: None if name == "tensorflow" else found(name, *of)
sys.argv = ["gpu_smoke.py", "--backends", "tensorflow", "--parts", "device"]
runpy.run_path({on_gpu.SMOKE!r}, run_name="__main__")
"""
    assert '"skipped": "tensorflow is not installed: nothing ran"' in run_python("-c", code)
