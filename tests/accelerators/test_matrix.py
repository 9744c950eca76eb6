"""The configurations for accelerators name what exists, and each case is in one part."""

import dataclasses
import shlex

import pytest

from tests.accelerators import on_gpu
from tests.accelerators.matrix import BACKENDS, ROWS
from tests.conformance import registry
from tests.docs.test_commands import parse
from tests.environment import CPU_DEVICES, values
from tests.fresh import ROOT, run_python
from tests.multiprocess import layouts

SUITES = {"tests.conformance.runner": registry.CONFORMANCE}
KEYS = """
from tests.conformance import registry
for suite in ("tests.conformance", "tests.facade", "tests.sharded"):
    for backend in registry.BACKENDS:
        for item in registry.items(backend, suite):
            print(suite, backend, item.key)
"""


def words_of(row):
    return shlex.split(row.command.format(device="gpu", hosts="h1:4,h2:4"))


@pytest.fixture(scope="module")
def keys():
    """The cases of each suite on so many accelerators, by devices, suite and backend."""
    found = {}
    for devices in sorted({row.devices for row in ROWS if not row.is_on_a_pod}):
        said = run_python("-c", KEYS, **{registry.SUITES_ON: f"gpu:{devices}"})
        for line in said.splitlines():
            suite, backend, key = line.split()
            found.setdefault((devices, suite, backend), []).append(key)
    return found


def of_suite(row, keys):
    """The keys that each pattern of a suite's row selects; None: it is no row of these suites."""
    _, module, *rest = words_of(row)
    suite = SUITES.get(module, module)
    if (row.devices, suite, row.backend) not in keys:
        return None
    backend, *patterns = rest
    assert backend == row.backend
    known = keys[row.devices, suite, backend]
    return {one: [key for key in known if one in key] for one in patterns or [""]}


def test_names_are_backend_devices_and_part():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    for row in ROWS:
        backend, where, _ = row.name.split(".", 2)
        assert (backend, where) == (row.backend, "pod" if row.is_on_a_pod else str(row.devices))
    assert {row.backend for row in ROWS} == set(registry.BACKENDS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_command_parses_and_names_what_exists(row, keys, gpu_smoke):
    flag, module, *rest = words_of(row)
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
    if module == "tests.multiprocess":
        backend, option, layout, *patterns = rest
        assert (backend, option) == (row.backend, "--layout")
        layout = layouts.Layout.of(layout)
        assert layout.replicas == row.devices
        known = list(layouts.keys(backend, layout))
        assert all(any(one in key for key in known) for one in patterns)
        return
    assert of_suite(row, keys) is not None
    # A theme may have no case for a number of devices, or for a backend.
    everywhere = [key for (_, suite, _), found in keys.items() for key in found]
    assert all(any(one in key for key in everywhere) for one in rest[1:])


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_case_is_in_one_part(backend, devices, keys):
    rows = [row for row in ROWS if (row.backend, row.devices) == (backend, devices)]
    ran = []
    for row in rows:
        ran += {key for found in (of_suite(row, keys) or {}).values() for key in found}
    suites = ["tests.conformance", "tests.facade", *["tests.sharded"] * (backend == "jax")]
    known = [key for suite in suites for key in keys.get((devices, suite, backend), ())]
    assert sorted(ran) == sorted(known)


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


def test_a_missing_framework_is_left_out_by_name():
    """A Python that has torch and JAX, but no TensorFlow."""
    code = f"""
import importlib.util as util, runpy, sys
found = util.find_spec
util.find_spec = lambda name, *of: None if name == "tensorflow" else found(name, *of)
sys.argv = ["gpu_smoke.py", "--backends", "tensorflow", "--parts", "device"]
runpy.run_path({str(ROOT / "benchmarks" / "gpu_smoke.py")!r}, run_name="__main__")
"""
    assert '"skipped": "tensorflow is not installed: nothing ran"' in run_python("-c", code)
