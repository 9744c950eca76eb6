"""What `kerasdist plan` refuses before it starts Keras, and what it prints."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest

from kerasdist.cli import formatting
from kerasdist.cli.plan import command, report
from kerasdist.cli.plan.hlo import Collective
from kerasdist.cli.plan.planning import Compilation, LargestBatch, Subject, Work, make_plan
from kerasdist.core.hardware import parse_target
from kerasdist.errors import BackendError
from tests.unit.printed import printed


@pytest.mark.parametrize(
    ("devices", "missing", "hint"),
    [
        ("8xh100", "jax_plugins", r"pip install --no-deps jax-cuda12-plugin==\d"),
        ("v5e:2x2", "libtpu", "pip install --no-deps libtpu"),
        ("v5e:2x2", "jax", r"pip install 'kerasdist\[plan\]'"),
    ],
)
def test_a_missing_compiler(monkeypatch, devices, missing, hint):
    monkeypatch.setattr(command, "is_installed", lambda name: not name.startswith(missing))
    with pytest.raises(BackendError, match=f"Expected .* to be installed.*Received: .*{hint}"):
        command.plan("train.py", devices=devices)


def test_a_missing_plotter(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendError, match="pip install matplotlib"):
        formatting.require_matplotlib()


def compilation(refused=None):
    return Compilation(
        batch=32,
        memory={"parameters": 4_000_000, "optimizer": 8_000_000},
        work=Work({"bfloat16": 3e12}, 2e9),
        collectives=[Collective("all-reduce", 4_000_000, 0, 0.5)],
        refused=refused,
        refused_bytes=200e9 if refused else 0.0,
    )


def plan_of(compiled, **of_subject):
    subject = Subject("train.py", "MirroredStrategy", 1_000_000, **of_subject)
    return make_plan(subject, 32, parse_target("8xh100"), lambda *_: compiled, largest=False)


def shown(plan):
    return printed(report.show, plan, width=300)


def test_a_table_of_variables_if_they_are_sharded():
    layout = SimpleNamespace(table="the {} largest".format)
    assert "the 12 largest" in shown(plan_of(compilation(), sharding="auto", layout=layout))
    assert "largest" not in shown(plan_of(compilation(), layout=layout))


def test_what_the_host_holds():
    work = Work({"bfloat16": 3e12}, 2e9, host_bytes=6.3e9)
    plan = plan_of(dataclasses.replace(compilation(), work=work))
    text = shown(plan)
    assert "The host holds 6.3 GB for each device, 50.4 GB in all" in text
    assert "at least 100 ms" in text
    assert "What limits is the way to the host's memory." in text
    assert "PCIe 3" in text
    assert json.loads(report.as_json(plan))["host_bytes"] == 6.3e9
    assert "PCIe" not in shown(plan_of(compilation()))


def test_what_is_printed_for_people():
    text = shown(plan_of(compilation()))
    for expected in (
        "train.py on 8 x NVIDIA H100 SXM 80 GB (8xh100), planned on JAX",
        "under MirroredStrategy, and has 1,000,000 parameters",
        "It fits: 12 MB of 63.7 GB a device.",
        "all-reduce",
        "3,000.0 GFLOP (bfloat16)",
        "What limits is the matrix units.",
        "4,096",
        "jax-ml.github.io/scaling-book/gpus",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (LargestBatch(272, "memory", None), "The largest batch that fits: 272 examples a device."),
        (
            LargestBatch(168, "data", 1_244_760),
            "168 examples a device fit, where the memory would hold about 1,200,000; no more were "
            "tried, since the script has 1,347 in all.",
        ),
        (
            LargestBatch(32, "data", None),
            "32 examples a device fit; no more were tried, since the script has 1,347 in all.",
        ),
        (
            LargestBatch(64, "search", None),
            "The largest batch that was tried and fits: 64 examples a device; the memory is not "
            "full.",
        ),
    ],
)
def test_what_is_printed_of_the_largest_batch(found, text):
    plan = dataclasses.replace(plan_of(compilation(), examples=1347), largest_batch=found)
    assert text in shown(plan).splitlines()
    facts = json.loads(report.as_json(plan))
    assert facts["largest_batch_per_device"] == found.examples
    assert facts["largest_batch_limit"] == found.limit


def test_what_does_not_fit_is_printed_without_a_step():
    plan = plan_of(compilation(refused="RESOURCE_EXHAUSTED"))
    text = shown(plan)
    assert "It does not fit: 200 GB of 63.7 GB a device." in text
    assert "Weak scaling" not in text
    assert json.loads(report.as_json(plan))["step"] is None
