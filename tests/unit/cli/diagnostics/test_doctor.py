"""``kerasdist doctor``: what it makes of what it finds."""

import io
import json
import resource
import socket

import pytest
import typer

from kerasdist.cli.diagnostics import findings, hosts, machine
from kerasdist.cli.diagnostics.findings import Finding
from kerasdist.core import backend_choice
from kerasdist.core.internals import Internal
from tests.unit.printed import printed


def verdicts(found):
    return {one.check: one.verdict for one in found}


LOSES = """
from kerasdist.core.internals import Internal
from kerasdist.keras_compat import internals
internals.LOST = Internal({"keras:Layer._lost": "all"}, feature="masks", without="refused")
"""


@pytest.fixture
def installed(monkeypatch):
    """Makes packages of certain versions those that would be imported."""
    known = backend_choice.framework_version

    def install(versions):
        def version(name):
            return versions.get(name) or known(name)

        monkeypatch.setattr(backend_choice, "framework_version", version)
        monkeypatch.setattr(machine, "framework_version", version)

    yield install
    backend_choice.floors.cache_clear()


class TestOneMachine:
    def test_every_check_says_what_it_means(self):
        found = machine.look()
        expected = {"versions", "backend", "devices", "processor", "environment", "ports"}
        assert expected | {"own name", "disk", "temporary disk", "open files"} <= set(
            verdicts(found)
        )
        assert all(one.found and one.meaning for one in found)

    @pytest.mark.parametrize(
        ("package", "version", "floor", "command"),
        [
            ("keras", "3.9.0", "3.12", "pip install 'keras>=3.12'"),
            ("jax", "0.4.1", "0.8.2", "pip install 'jax>=0.8.2'"),
            ("tensorflow", "2.16.1", "2.18", "pip install 'tensorflow-cpu>=2.18'"),
            ("torch", "2.4.0+cu124", "2.9", "pip install 'torch>=2.9'"),
        ],
    )
    def test_old_packages(self, installed, package, version, floor, command):
        installed({package: version})
        bad, good = machine._versions()
        assert (bad.verdict, good.verdict) == ("problem", "ok")
        assert bad.found == f"{package} {version}, where kerasdist needs >={floor}"
        assert bad.meaning.endswith(f"Install it: {command}.")
        assert f"{package} " not in good.found

    @pytest.mark.parametrize(
        "versions",
        [
            {"keras": "3.12.0"},
            {"keras": "3.16.0.dev2026102704", "torch": "2.9.0a0+50eac811a6.nv25.09"},
            {"jax": "built here"},
        ],
    )
    def test_versions_that_are_new_enough(self, installed, versions):
        installed(versions)
        [found] = machine._versions()
        assert found.verdict == "ok"
        assert all(f"{name} {version}" in found.found for name, version in versions.items())

    def test_a_checkout_that_is_not_installed_knows_no_lowest_versions(
        self, installed, monkeypatch
    ):
        installed({"keras": "3.9.0"})
        monkeypatch.setattr(backend_choice, "version_of", lambda _: None)
        backend_choice.floors.cache_clear()
        [found] = machine._versions()
        assert found.verdict == "ok"
        assert f"kerasdist {machine.__version__}" in found.found

    @pytest.mark.parametrize(
        ("folders", "verdict", "said"),
        [
            (("a", "a"), "problem", "keras 3.15.1 and keras-nightly 3.16.0.dev1, in one folder"),
            (("a", "b"), "warning", "keras 3.15.1 and keras-nightly 3.16.0.dev1; the one in"),
            (("b", "a"), "warning", "keras-nightly 3.16.0.dev1 and keras 3.15.1; the one in"),
        ],
    )
    def test_keras_twice(self, monkeypatch, tmp_path, folders, verdict, said):
        made = zip(folders, (("keras", "3.15.1"), ("keras_nightly", "3.16.0.dev1")), strict=True)
        for folder, (name, version) in made:
            information = tmp_path / folder / f"{name}-{version}.dist-info"
            information.mkdir(parents=True)
            text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            (information / "METADATA").write_text(text)
        monkeypatch.setattr(machine.sys, "path", [str(tmp_path / "a"), str(tmp_path / "b")])
        [found] = machine._nightly()
        assert found.verdict == verdict
        assert said in found.found
        assert "pip uninstall --yes keras" in found.meaning
        assert "&& pip install keras, or keras-nightly in its place" in found.meaning
        if verdict == "warning":
            assert str(tmp_path / "a") in found.found

    def test_keras_once(self):
        assert [*machine._nightly()] == []

    @pytest.mark.parametrize("in_each_fit", [False, True])
    def test_an_internal_that_is_gone(self, monkeypatch, in_each_fit):
        monkeypatch.setitem(backend_choice.TESTED, "json", ("1.0",))
        gone = Internal(
            {"json:JSONDecoder.new": "2.0", "json:JSONDecoder.old": "1.0"},
            feature="custom loops",
            without="refused",
            in_each_fit=in_each_fit,
        )
        there = Internal({"json:JSONDecoder": "all"}, feature="all", without="none")
        [found] = machine.of_internals("jax", [there, gone])
        assert found.verdict == ("problem" if in_each_fit else "warning")
        assert found.found.endswith("has no json:JSONDecoder.new")
        assert "Needed for custom loops. Without it: refused." in found.meaning
        assert "pip install json==1.0" in found.meaning
        [found] = machine.of_internals("jax", [there, there])
        assert found.verdict == "ok"
        assert found.found.startswith("all 2 that kerasdist uses exist in keras 3.")

    def test_internals_are_looked_at_in_a_process_with_the_framework(self, monkeypatch, tmp_path):
        monkeypatch.setenv("KERAS_BACKEND", "torch")
        [found] = machine._internals()
        assert found.verdict == "ok"
        assert "keras 3." in found.found
        assert "torch 2." in found.found
        path = f"{tmp_path}:{machine.os.environ.get('PYTHONPATH', '')}"
        monkeypatch.setenv("PYTHONPATH", path)
        (tmp_path / "sitecustomize.py").write_text(LOSES)
        found = [*machine._internals()]
        assert ["keras:Layer._lost" in one.found for one in found] == [True]
        (tmp_path / "keras.py").write_text("raise ImportError('half of Keras')")
        (tmp_path / "sitecustomize.py").unlink()
        [found] = machine._internals()
        assert (found.verdict, found.found) == ("problem", "ImportError: half of Keras")

    def test_a_framework_that_takes_too_long(self, monkeypatch):
        monkeypatch.setenv("KERAS_BACKEND", "torch")
        monkeypatch.setattr(machine, "_SECONDS_TO_IMPORT", 0.01)
        [found] = machine._internals()
        assert found.verdict == "warning"

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
