"""``kerasdist doctor``: what it makes of what it finds."""

import io
import json
import resource
import socket

import pytest
import typer

from kerasdist.checks import findings, hosts, machine
from kerasdist.checks.findings import Finding
from tests.unit.printed import printed


def verdicts(found):
    return {one.check: one.verdict for one in found}


class TestOneMachine:
    def test_every_check_says_what_it_means(self):
        found = machine.look()
        expected = {"versions", "backend", "devices", "processor", "environment", "ports"}
        assert expected | {"own name", "disk", "temporary disk", "open files"} <= set(
            verdicts(found)
        )
        assert all(one.found and one.meaning for one in found)

    @pytest.mark.parametrize(
        ("versions", "verdict", "said"),
        [
            ({"keras": "3.9.0"}, "problem", "keras 3.9.0, where kerasdist needs >=3.12"),
            ({"jax": "0.4.1"}, "problem", "jax 0.4.1, where kerasdist needs >=0.8.2"),
            # A checkout that is not installed.
            ({"kerasdist": None}, "ok", f"kerasdist {machine.__version__}"),
        ],
    )
    def test_defect_9_old_packages(self, monkeypatch, versions, verdict, said):
        known = machine.metadata.version

        def version(package):
            if versions.get(package, "") is None:
                raise machine.metadata.PackageNotFoundError(package)
            return versions.get(package) or known(package)

        monkeypatch.setattr(machine.metadata, "version", version)
        [found] = machine._versions()
        assert found.verdict == verdict
        assert said in found.found

    def test_a_backend_that_is_not_there(self, monkeypatch):
        monkeypatch.setenv("KERAS_BACKEND", "pytorch")
        [found] = machine._backend()
        assert found.verdict == "problem"
        assert "KERAS_BACKEND=torch" in found.meaning

    def test_a_contradiction_in_the_environment(self, monkeypatch):
        monkeypatch.setenv("KERASDIST_RANK", "1")
        [found] = machine._cluster()
        assert found.verdict == "problem"

    @pytest.mark.parametrize(
        ("free", "verdict"), [(64 << 20, "warning"), (1 << 30, "ok"), (0, "warning")]
    )
    def test_shared_memory(self, monkeypatch, tmp_path, free, verdict):
        left = machine.shutil.disk_usage("/")._replace(free=free)
        monkeypatch.setattr(machine, "_SHM", tmp_path)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: left)
        [found] = machine._shared_memory()
        assert found.verdict == verdict
        assert ("--shm-size=8g" in found.meaning) == (verdict == "warning")

    def test_open_files_and_disks(self, monkeypatch):
        for soft, verdict in ((1024, "warning"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")):
            monkeypatch.setattr(machine.resource, "getrlimit", lambda _, soft=soft: (soft, 65536))
            assert [one.verdict for one in machine._files()] == [verdict]
        usage = machine.shutil.disk_usage("/")
        for free, verdict in ((5e8, "problem"), (5e9, "warning"), (5e10, "ok")):
            left = usage._replace(free=free)
            monkeypatch.setattr(machine.shutil, "disk_usage", lambda _, left=left: left)
            assert {one.verdict for one in machine._disks()} == {verdict}

    def test_a_machine_whose_name_is_loopback(self, monkeypatch):
        for address, verdict in (("127.0.1.1", "warning"), ("10.0.0.7", "ok")):
            monkeypatch.setattr(machine, "resolved", lambda _, address=address: [address])
            assert [one.verdict for one in machine._name()] == [verdict]

    def test_the_exit_code_and_the_json(self, monkeypatch, capsys):
        given = [Finding("a", "warning", "[worker 0/2] b", "c")]
        monkeypatch.setattr(machine, "look", lambda: given)
        with pytest.raises(typer.Exit) as ended:
            hosts.doctor(as_json=True)
        assert ended.value.exit_code == 0
        [told] = json.loads(capsys.readouterr().out)
        assert (told["check"], told["verdict"], told["meaning"]) == ("a", "warning", "c")
        given.append(Finding("d", "problem", "e", "f"))
        with pytest.raises(typer.Exit) as ended:
            hosts.doctor()
        assert ended.value.exit_code == 1
        said = capsys.readouterr().out
        assert "[worker 0/2] b" in said
        assert "0 ok, 1 warning, 1 problem\n" in said


class TestSeveralHosts:
    def test_versions_that_differ(self):
        facts = {"a": {"keras": "3.15", "jax": "0.7"}, "b": {"keras": "3.15"}}
        found = hosts.of_versions(facts)
        assert found.verdict == "problem"
        assert found.found == "jax: 0.7 on a, none on b"
        assert hosts.of_versions({"a": {"keras": "1"}, "b": {"keras": "1"}}).verdict == "ok"

    def test_who_reaches_whom(self):
        well = {"addresses": ["10.0.0.1"], "error": None}
        closed = {"addresses": ["10.0.0.1"], "error": "timed out"}
        unknown = {"addresses": [], "error": "Name or service not known"}
        itself = {"addresses": ["127.0.1.1"], "error": "Connection refused"}
        assert verdicts(hosts.of_reached({("a", "b"): well, ("b", "a"): well})) == {
            "names": "ok",
            "ports": "ok",
        }
        [names, ports] = hosts.of_reached({("a", "b"): well, ("b", "a"): closed})
        assert (names.verdict, ports.verdict, ports.where) == ("ok", "problem", "b to a")
        assert "firewall" in ports.meaning
        [one, other] = hosts.of_reached({("a", "b"): unknown, ("b", "a"): itself})
        assert (one.check, other.check) == ("names", "names")
        assert "unknown on a" in one.found
        assert "a is 127.0.1.1 on b" in other.found

    def test_what_is_well_on_a_host_is_one_line(self):
        found = [Finding(name, "ok", "x", "y", "host") for name in "abcd"]
        found += [Finding("e", "warning", "x", "y", "host"), Finding("f", "ok", "x", "y", "other")]
        shortened = hosts._shortened(found)
        assert [one.check for one in shortened] == ["4 checks", "e", "f"]
        assert "a, b, c, d" in printed(findings.show, "Title", shortened)


class TestAgent:
    def test_it_reaches_another_and_knows_it(self, monkeypatch):
        monkeypatch.setattr(machine, "look", list)
        answers = io.StringIO()
        hosts.serve(io.StringIO(), answers)
        there = {"host": "127.0.0.1", **json.loads(answers.getvalue())["listens"]}
        with socket.create_server(("127.0.0.1", 0)) as closed:
            free = closed.getsockname()[1]
        others = [
            there,
            {**there, "name": "another"},
            {**there, "port": free},
            {**there, "host": "no-such-host.invalid"},
        ]
        answers = io.StringIO()
        hosts.serve(io.StringIO(json.dumps(others)), answers)
        facts, reached = map(json.loads, answers.getvalue().splitlines())
        assert facts["versions"]["Python"]
        assert facts["versions"]["kerasdist"]
        well, other, closed, unknown = reached
        assert well == {"addresses": ["127.0.0.1"], "error": None}
        assert other["error"] == "another machine answers there"
        assert "refused" in closed["error"]
        assert unknown["addresses"] == []
