"""Which worker runs where, and the command that gets it there."""

import shlex
import socket

import pytest

from kerasdist.errors import ClusterError
from kerasdist.launch import start
from kerasdist.launch.placement import Slot, open_coordinator, place
from kerasdist.launch.spec import JobSpec, python_command
from kerasdist.launch.start import for_another_machine, job_variables, worker_variables


def shape(workers, *hosts):
    return [(each.host, each.local_rank, each.local_workers) for each in place(workers, hosts)]


@pytest.mark.parametrize(
    ("workers", "hosts", "sizes"),
    [
        (None, ["a,b"], {"a": 1, "b": 1}),
        (None, ["a:2,b:1"], {"a": 2, "b": 1}),
        (None, ["a:2,b"], {"a": 2, "b": 1}),
        (3, ["a:2,b:4"], {"a": 2, "b": 1}),
        (2, ["a:2,b:4"], {"a": 2}),
        (5, ["a,b"], {"a": 3, "b": 2}),
        (1, ["a", "b"], {"a": 1}),
        (None, [], {None: 1}),
        (2, [], {None: 2}),
        (None, ["n[09-10]:2"], {"n09": 2, "n10": 2}),
    ],
)
def test_hosts_are_filled_in_order(workers, hosts, sizes):
    slots = place(workers, hosts)
    assert [slot.rank for slot in slots] == list(range(sum(sizes.values())))
    assert [(slot.host, slot.local_rank, slot.local_workers) for slot in slots] == [
        (host, local, size) for host, size in sizes.items() for local in range(size)
    ]


@pytest.mark.parametrize(
    ("workers", "hosts"),
    [(0, []), (5, ["a:2,b:2"]), (None, ["a,a"]), (None, ["a:0"]), (None, ["a:x"]), (None, [""])],
)
def test_what_cannot_be_placed(workers, hosts):
    with pytest.raises(ClusterError, match="Received: "):
        place(workers, hosts)


def test_this_machine_needs_no_ssh():
    for here in ("localhost", socket.gethostname()):
        assert shape(None, f"{here}:2,far") == [(None, 0, 2), (None, 1, 2), ("far", 0, 1)]
    with pytest.raises(ClusterError, match="once"):
        shape(None, f"localhost,{socket.gethostname()}")


@pytest.mark.parametrize(
    ("hosts", "host"),
    [
        ([], "127.0.0.1"),
        (["localhost:2"], "127.0.0.1"),
        (["localhost,far"], socket.gethostname()),
        (["me@far,localhost"], "far"),
    ],
)
def test_they_meet_where_rank_0_is(hosts, host):
    opened = [open_coordinator(place(None, hosts)) for _ in range(5)]
    assert {address.rpartition(":")[0] for address, _ in opened} == {host}
    assert len({address for address, _ in opened}) > 1  # the port differs from start to start
    for address, listener in opened:
        assert (listener is None) == (host == "far")
        if listener is not None:
            with listener:
                name, port = listener.getsockname()[:2]
            assert str(port) == address.rpartition(":")[2]
            assert name == ("127.0.0.1" if host == "127.0.0.1" else "0.0.0.0")


def test_a_port_in_use_is_not_taken(monkeypatch):
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("", 0))
        other.bind(("", 0))
        used, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        drawn = iter([used, free])
        monkeypatch.setattr("kerasdist.launch.placement.addresses.of_job", lambda _: next(drawn))
        address, listener = open_coordinator(place(1, []))
        assert address == f"127.0.0.1:{free}"
        assert listener is not None
        listener.close()


def test_a_remote_command_survives_the_shell(monkeypatch, tmp_path):
    folder = tmp_path / "some folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    spec = JobSpec(
        python_command("a script.py", ["'", '"$HOME"', "a\nb", ""], python="/opt/python"),
        stop_seconds=7.5,
    )
    *ssh, dashes, host, line = start.supervisor_there(spec, "far", "/a 'b' $c")
    assert (ssh[0], dashes, host) == ("ssh", "--", "far")
    assert "BatchMode=yes" in ssh
    assert line.startswith(f"cd '{folder}' && exec env ")
    split = shlex.split(line)
    assert "PYTHONPATH=/a 'b' $c" in split
    supervisor = ["/opt/python", "-P", "-m", "kerasdist.launch.supervisor"]
    assert split[split.index("/opt/python") :] == supervisor
    orders = start.orders_of(spec, Slot("far", 1, 0, 2), {"MINE": "$x"})
    assert orders["command"] == ["/opt/python", "a script.py", "'", '"$HOME"', "a\nb", ""]
    assert (orders["seconds_to_stop"], orders["local_workers"], orders["must_join"]) == (
        7.5,
        2,
        False,
    )
    assert orders["variables"] == {"MINE": "$x"}


def test_what_another_machine_gets():
    environ = {
        "KERAS_BACKEND": "jax",
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/code",
        "TF_CONFIG": "{}",
        "TF_VAR_password": "s",
        "TF_TOKEN_app_terraform_io": "s",
        "TF_GPU_ALLOCATOR": "cuda_malloc_async",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PATH": "/bin",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "0",
        "AWS_SECRET_ACCESS_KEY": "s",
        "KERASDIST_SECRET": "s",
        "KERASDIST_SECRET_FILE": "/home/me/secret",
    }
    assert set(for_another_machine(environ)) == {
        *("KERAS_BACKEND", "NCCL_DEBUG", "PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL"),
        *("TF_GPU_ALLOCATOR", "KERASDIST_SECRET", "KERASDIST_SECRET_FILE"),
    }


def test_ours_win_over_those_given():
    spec = JobSpec(("true",), environment={"KERASDIST_RANK": "9", "PYTHONUNBUFFERED": "0"})
    variables = worker_variables(spec, Slot(None, 1, 1, 2), 2, "h:1", 0)
    assert variables["KERASDIST_RANK"] == "1"
    assert variables["PYTHONUNBUFFERED"] == "0"
    assert "KERASDIST_CPU_DEVICES" not in variables


def test_every_start_of_a_job_has_a_secret_and_a_name(monkeypatch):
    monkeypatch.delenv("KERASDIST_SECRET", raising=False)
    monkeypatch.delenv("KERASDIST_SECRET_FILE", raising=False)
    one, other = (job_variables(JobSpec(("true",)), 0) for _ in range(2))
    for name in ("KERASDIST_SECRET", "KERASDIST_JOB_ID"):
        assert one[name] != other[name]
    assert len(one["KERASDIST_SECRET"]) == 64


@pytest.mark.parametrize("name", ["KERASDIST_SECRET", "KERASDIST_SECRET_FILE"])
def test_a_secret_that_the_user_sets_is_used(monkeypatch, name):
    monkeypatch.delenv("KERASDIST_SECRET", raising=False)
    assert "KERASDIST_SECRET" not in job_variables(
        JobSpec(("true",), environment={name: "mine"}), 0
    )
    monkeypatch.setenv(name, "mine")
    assert "KERASDIST_SECRET" not in job_variables(JobSpec(("true",)), 0)
