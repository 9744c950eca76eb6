"""Workers on other machines, through an ``ssh`` that runs the command here, by a shell, as sshd."""

import json

import pytest

from kerasdist.cli.launch import supervisor
from tests.multiprocess import hosts
from tests.multiprocess.launching import command_line, ended, finish, said, write

TELL = """
import json
names = ["ON", "KERASDIST_RANK", "KERASDIST_LOCAL_RANK", "KERASDIST_LOCAL_WORKERS",
         "KERASDIST_WORKERS", "KERASDIST_COORDINATOR", "KERAS_BACKEND", "SECRET", "TF_CONFIG",
         "TF_VAR_password", "MINE", "KERASDIST_SECRET"]
print(json.dumps([sys.argv[1:], os.getcwd(), {name: os.environ.get(name) for name in names}]))
"""


@pytest.fixture
def path(tmp_path) -> dict[str, str]:
    """The variables with which the fake ssh is found, and kerasdist by it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    hosts.take_down(folder, "down")
    # Another machine has its own environment: what is not on the command line is not there.
    return hosts.make(folder, "PATH", "HOME", "LANG")


def test_each_host_gets_its_share(tmp_path, path):
    arguments = ["a b", "'quoted\" $HOME", "line\nbreak", "*", ""]
    here = tmp_path / "a folder's $HOME"  # which a shell there reads, too
    here.mkdir()
    done = ended(
        command_line("run", "--hosts", "n[01-02]:2,me@far", write(tmp_path, TELL), *arguments),
        folder=here,
        **{**path, "KERAS_BACKEND": "jax", "SECRET": "s", "TF_CONFIG": "{}"},
    )
    assert done.returncode == 0
    assert "on n01:2, n02:2, me@far:1, backend jax (KERAS_BACKEND)" in done.stderr
    assert "5 workers ran, and none joined the job" in said(done)
    found = sorted(
        (json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()),
        key=lambda each: each[2]["KERASDIST_RANK"],
    )
    assert all(given == arguments for given, _, _ in found)
    assert {folder for _, folder, _ in found} == {str(here)}
    variables = [each for _, _, each in found]
    assert [(one["ON"], one["KERASDIST_LOCAL_RANK"]) for one in variables] == [
        ("n01", "0"),
        ("n01", "1"),
        ("n02", "0"),
        ("n02", "1"),
        ("me@far", "0"),
    ]
    assert [one["KERASDIST_LOCAL_WORKERS"] for one in variables] == ["2", "2", "2", "2", "1"]
    [coordinator] = {one["KERASDIST_COORDINATOR"] for one in variables}
    assert coordinator.startswith("n01:")
    assert {(one["KERAS_BACKEND"], one["SECRET"], one["TF_CONFIG"]) for one in variables} == {
        ("jax", None, None)
    }


def test_no_variable_is_an_argument(tmp_path, path):
    """Every user of a machine sees arguments; Terraform's secrets stay here."""
    done = finish(
        *("run", "--hosts", "n1,n2", "--env", "MINE=only by the input", "--env", "SECRET"),
        write(tmp_path, TELL),
        **{**path, "KERAS_BACKEND": "jax", "TF_VAR_password": "s", "KERASDIST_SECRET": "shared"},
        SECRET="from here",
    )
    assert done.returncode == 0
    for line in done.stdout.splitlines():
        _, _, variables = json.loads(line.partition("] ")[2])
        assert variables["TF_VAR_password"] is None
        assert variables["MINE"] == "only by the input"
        assert variables["KERASDIST_SECRET"] == "shared"
        assert variables["SECRET"] == "from here"
    arguments = (tmp_path / "bin" / "ssh.log").read_text()
    assert len(arguments.splitlines()) == 2
    assert all("BatchMode=yes" in line and " -- n" in line for line in arguments.splitlines())
    assert not any(
        word in arguments for word in ("only by", "from here", "shared", "KERAS_BACKEND", "TF_VAR")
    )


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "n1,-oProxyCommand=touch x"])
def test_a_host_is_no_option_of_ssh(tmp_path, path, host):
    """A name that begins with a dash is refused, and ssh not called."""
    done = finish("run", f"--hosts={host}", write(tmp_path, ""), **path)
    assert done.returncode == 1
    assert "does not begin with a dash. Received: hosts='-oProxyCommand=touch x'" in done.stderr
    assert not (tmp_path / "bin" / "ssh.log").exists()


def test_a_host_that_is_down(tmp_path, path):
    done = finish("run", "--hosts", "n1,down", write(tmp_path, "time.sleep(60)"), **path)
    assert done.returncode == 255
    assert "worker 1/2 failed" in done.stderr
    assert "Connection refused" in done.stderr
    assert "ssh, too, ends with exit code 255" in done.stderr


def test_no_ssh(tmp_path):
    done = finish("run", "--hosts", "n1", write(tmp_path, ""), PATH=str(tmp_path))
    assert done.returncode == 1
    assert "'ssh'" in done.stderr


def test_reports_come_through_ssh_and_stay_out_of_the_logs(tmp_path, path):
    body = """
from kerasdist.job.launcher import channel
print("before ", end="", flush=True)
channel().tell({"workers": 1, "phase": "training", "epoch": 3})
time.sleep(0.5)
print("after")
"""
    logs = tmp_path / "logs"
    done = finish(*("run", "--hosts", "far", "--log-dir", logs, write(tmp_path, body)), "x", **path)
    assert done.returncode == 0, done.stderr
    [worker] = json.loads((logs / "status.json").read_text(encoding="utf-8"))["workers"]
    assert (worker["host"], worker["epoch"], worker["phase"]) == ("far", 3, "ended")
    log = (logs / "attempt-0-worker-0.log").read_text(encoding="utf-8")
    assert log == f"before after\n{supervisor.APART}\n"  # as on this machine
