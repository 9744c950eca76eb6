"""``kerasdist run --dry-run``, completion, and the help of the commands."""

import pytest
from typer.testing import CliRunner

from kerasdist.cli.app import app
from kerasdist.cli.launch import report
from kerasdist.cli.launch.spec import JobSpec


def described(**spec):
    first, *workers = report.of_dry_run(JobSpec(("python", "train.py", "a b"), **spec)).split(
        "\n\n"
    )
    return first, [worker.splitlines() for worker in workers]


def test_two_workers_here(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.chdir(tmp_path)
    first, workers = described(workers=2, devices_per_worker=2)
    assert first == "2 workers on this machine, backend jax (KERAS_BACKEND)"
    assert len(workers) == 2
    for rank, lines in enumerate(workers):
        assert lines[0] == f"worker {rank}/2 on this machine"
        assert lines[1] == f"  cd {tmp_path}"
        assert lines[-1] == "  python train.py 'a b'"
        variables = dict(line.strip().split("=", 1) for line in lines[2:-1])
        assert variables == {
            "KERASDIST_COORDINATOR": "127.0.0.1:<port>",
            "KERASDIST_CPU_DEVICES": "2",
            "KERASDIST_JOB_ID": "<hidden>",
            "KERASDIST_LOCAL_RANK": str(rank),
            "KERASDIST_LOCAL_WORKERS": "2",
            "KERASDIST_MEMORY": "<hidden>",
            "KERASDIST_RANK": str(rank),
            "KERASDIST_RESTART": "0",
            "KERASDIST_SECRET": "<hidden>",
            "KERASDIST_WORKERS": "2",
            "OMP_NUM_THREADS": "3",
            "PYTHONUNBUFFERED": "1",
        }


def test_other_hosts_and_a_given_secret(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    _, workers = described(hosts=("me@a:1,b:1",), environment={"KERASDIST_SECRET": "s3cret"})
    assert [lines[0] for lines in workers] == [
        "worker 0/2 on me@a, by ssh",
        "worker 1/2 on b, by ssh",
    ]
    for lines in workers:
        assert "  KERASDIST_COORDINATOR=a:<port>" in lines
        assert "  NCCL_DEBUG=INFO" in lines
        assert "  KERASDIST_SECRET=<hidden>" in lines
        assert not any("s3cret" in line for line in lines)


def test_nothing_is_started(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it was started')", encoding="utf-8")
    done = CliRunner().invoke(
        app, ["run", "--dry-run", "-n", "1", str(script)], env={"KERAS_BACKEND": "jax"}
    )
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].endswith(f" {script}")


@pytest.mark.parametrize("command", ["run", "join", "plan", "bench", "test", "doctor", "info"])
def test_the_help_has_no_types_of_python(command):
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert "<" not in done.output
    assert "{" not in done.output
    assert "-h, --help" in done.output


def test_the_commands_are_told_in_whole_sentences():
    done = CliRunner().invoke(app, ["--help"])
    _, _, commands = done.output.partition("Commands:\n")
    lines = commands.strip().splitlines()
    assert len(lines) == 7
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def test_completion_of_a_command():
    # As the shell's function asks, which --show-completion prints.
    variables = {
        "_KERASDIST_COMPLETE": "complete_bash",
        "COMP_WORDS": "kerasdist do",
        "COMP_CWORD": "1",
    }
    done = CliRunner().invoke(app, [], prog_name="kerasdist", env=variables)
    assert done.output.split() == ["doctor"]
