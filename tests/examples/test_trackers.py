"""The recipe of Weights & Biases and MLflow: the chief alone logs, each epoch once.

Stand-ins for the two packages write down the calls; the packages themselves were run by hand.
"""

import json
import re

import pytest

from tests.environment import path_of_users
from tests.examples.test_examples import EXAMPLES, TIME_LIMIT_S, run_python
from tests.fresh import ROOT

SCRIPT = EXAMPLES / "track_experiments.py"
EPOCHS = 3
# What the script may call, with the arguments that the package's own function takes by name.
STAND_IN = """
import json, os
from pathlib import Path

def _note(name, /, **given):
    with Path({path!r}).open("a", encoding="utf-8") as file:
        file.write(json.dumps([os.getpid(), name, given]) + chr(10))
"""
WANDB = """
class _Run:
    def log(self, data, step): _note("log", data=data, step=step)
    def finish(self): _note("finish")

def init(*, dir, config, project, mode):
    _note("init", dir=dir, config=config, project=project, mode=mode)
    return _Run()
"""
MLFLOW = """
def set_tracking_uri(uri): _note("set_tracking_uri", uri=uri)
def set_experiment(experiment_name): _note("set_experiment", name=experiment_name)
def start_run(): _note("start_run")
def log_params(params): _note("log_params", params=params)
def log_metrics(metrics, step): _note("log_metrics", data=metrics, step=step)
def end_run(): _note("end_run")
"""
LAUNCHER = ("-m", "kerasdist", "run", "--workers", "2")


@pytest.mark.timeout(2 * TIME_LIMIT_S)
def test_the_chief_alone_logs_each_epoch_once(tmp_path):
    stand_ins, runs = tmp_path / "packages", tmp_path / "runs"
    stand_ins.mkdir()
    for name, calls in (("wandb", WANDB), ("mlflow", MLFLOW)):
        head = STAND_IN.format(path=str(tmp_path / f"{name}.jsonl"))
        (stand_ins / f"{name}.py").write_text(head + calls, encoding="utf-8")
    said = run_python(
        *(*LAUNCHER, SCRIPT, "--epochs", str(EPOCHS), "--folder", runs),
        backend="torch",
        PYTHONPATH=f"{stand_ins}:{path_of_users()}",
    )
    loss = re.search(r"2 replicas: loss ([\d.]+), 2 trackers", said)
    assert loss is not None, said
    written = {
        name: [*map(json.loads, (tmp_path / f"{name}.jsonl").read_text("utf-8").splitlines())]
        for name in ("wandb", "mlflow")
    }
    assert len({process for lines in written.values() for process, *_ in lines}) == 1  # the chief
    config = {"batch_size": 64, "replicas": 2}
    [(_, begun, options), *logged, (_, ended, _)] = written["wandb"]
    assert (begun, options.pop("mode"), ended) == ("init", "offline", "finish")
    assert options == {"dir": str(runs), "config": config, "project": "digits"}
    [store, experiment, run, params, *metrics, end] = [line[1:] for line in written["mlflow"]]
    assert store == ["set_tracking_uri", {"uri": (runs / "mlflow").as_uri()}]
    assert experiment == ["set_experiment", {"name": "digits"}]
    assert params == ["log_params", {"params": config}]
    assert [run, end] == [["start_run", {}], ["end_run", {}]]
    epochs = [given for _, _, given in logged]
    assert epochs == [given for _, given in metrics]
    assert [one["step"] for one in epochs] == [*range(EPOCHS)]
    assert sorted(epochs[-1]["data"]) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert f"{epochs[-1]['data']['loss']:.4f}" == loss[1]


def test_without_the_packages_it_trains(tmp_path):
    """Neither is required: the tests' own environment has neither."""
    said = run_python(SCRIPT, "--epochs", "1", "--folder", tmp_path, backend="torch")
    assert re.search(r"2 replicas: loss [\d.]+, 0 trackers", said), said


def test_the_page_has_the_callbacks_of_the_script():
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    source = SCRIPT.read_text(encoding="utf-8")
    begin, end = source.index("class LogToWandb"), source.index("def main()")
    assert source[begin:end].strip() in page
