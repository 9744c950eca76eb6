"""`benchmarks/gpu_smoke.py` on a CPU: one line of JSON a part, and none stops the others."""

import json
import subprocess
import sys

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


def test_a_part_whose_process_dies_stops_no_other(gpu_smoke, monkeypatch, capsys):
    def run(command, **options):
        died = subprocess.CompletedProcess(command, -11, "", "Segmentation fault")
        lived = subprocess.CompletedProcess(command, 0, '{"ok": true}', "")
        return died if "correctness.cnn" in command else lived

    monkeypatch.setattr(gpu_smoke.subprocess, "run", run)
    options = ["--device", "cpu", "--backends", "jax", "--parts", "correctness.[cm]*n*"]
    monkeypatch.setattr(sys, "argv", ["gpu_smoke.py", *options])
    assert gpu_smoke.main() == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    failed = [line for line in lines if not line["ok"]]
    assert [line["part"] for line in failed] == ["correctness.cnn"]
    assert "exit status -11: Segmentation fault" in failed[0]["error"]
    assert len(lines) > 3
