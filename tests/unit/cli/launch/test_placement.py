"""Which worker runs where, and the command that gets it there."""

import socket

import pytest

from kerasdist.cli.launch.placement import Slot, open_coordinator, place
from kerasdist.cli.launch.spec import JobSpec
from kerasdist.cli.launch.start import for_another_machine, job_variables, worker_variables
from kerasdist.errors import ClusterError


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
        monkeypatch.setattr(
            "kerasdist.cli.launch.placement.addresses.of_job", lambda _: next(drawn)
        )
        address, listener = open_coordinator(place(1, []))
        assert address == f"127.0.0.1:{free}"
        assert listener is not None
        listener.close()


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


@pytest.mark.parametrize("name", ["KERASDIST_SECRET", "KERASDIST_SECRET_FILE"])
def test_a_secret_that_the_user_sets_is_used(monkeypatch, name):
    monkeypatch.delenv("KERASDIST_SECRET", raising=False)
    assert "KERASDIST_SECRET" not in job_variables(
        JobSpec(("true",), environment={name: "mine"}), 0
    )
    monkeypatch.setenv(name, "mine")
    assert "KERASDIST_SECRET" not in job_variables(JobSpec(("true",)), 0)
