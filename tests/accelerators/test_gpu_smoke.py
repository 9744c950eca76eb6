"""`benchmarks/gpu_smoke.py` on a CPU: one line of JSON a part, and none stops the others."""

import json

from tests.fresh import ROOT, run_python

SCRIPT = ROOT / "benchmarks" / "gpu_smoke.py"


def test_a_part_gives_one_line_of_json():
    said = run_python(
        *(SCRIPT, "--device", "cpu", "--backends", "torch", "--parts", "correctness.mlp"),
        PYTHONPATH=str(ROOT),
    )
    device, mlp = map(json.loads, said.splitlines())
    assert device["part"] == "device"
    assert device["devices"] == ["cpu:0"]
    assert mlp["ok"]
    assert mlp["largest difference"] == {"one device": 0.0, "mirrored": 0.0}
