"""``kerasdist run``: workers start, are told who they are, and end together."""

import dataclasses
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

import kerasdist
from kerasdist.cli.launch import job as launch_job
from kerasdist.cli.launch import start, supervisor, worker
from kerasdist.cli.launch.job import Launcher
from kerasdist.cli.launch.placement import Slot
from kerasdist.cli.launch.spec import JobSpec, python_command
from kerasdist.job.interruption import ExitCode
from tests.multiprocess.launching import (
    finish,
    left_after,
    run,
    said,
    started,
    supervised,
    wait_for,
    write,
)

TELL = """
import json
names = [name for name in os.environ if name.startswith(("KERASDIST_", "PYTHONUNB", "MINE"))]
print(json.dumps([sys.argv[1:], {name: os.environ[name] for name in names}]))
"""


class TestCommandLine:
    def test_every_worker_is_told_its_place_and_gets_the_arguments(self, tmp_path):
        arguments = ["--workers", "9", "-h", "a b", "--", "'\"$HOME"]
        done = finish(
            *("run", "--workers", 2, "--devices-per-worker", 3, "--env", "MINE=a=b"),
            *(write(tmp_path, TELL), *arguments),
        )
        assert done.returncode == 0
        assert "warning: 2 workers ran, and none joined the job" in said(done)
        lines = (line.partition("] ") for line in sorted(done.stdout.splitlines()))
        named, told = zip(*((prefix, json.loads(text)) for prefix, _, text in lines), strict=True)
        assert named == ("[worker 0/2", "[worker 1/2")
        assert [given for given, _ in told] == [arguments] * 2
        # Which variables there are besides: `tests/unit/cli/launch/test_dry_run.py`.
        chief, other = (variables for _, variables in told)
        joined = [Path(one.pop("KERASDIST_JOINED_FILE")) for one in (chief, other)]
        assert not any(path.exists() for path in joined)
        own = {"KERASDIST_RANK": "0", "KERASDIST_LOCAL_RANK": "0"}
        assert chief.pop("KERASDIST_COORDINATOR_FD").isdecimal()
        assert chief == other | own
        assert other["KERASDIST_RANK"] == other["KERASDIST_LOCAL_RANK"] == "1"
        assert other["KERASDIST_COORDINATOR"].startswith("127.0.0.1:")
        assert len(other["KERASDIST_SECRET"]) == 64
        job = other["KERASDIST_JOB_ID"].rpartition("-")[0]
        assert other["KERASDIST_MEMORY"] == f"/dev/shm/kerasdist-{job}"
        assert (other["KERASDIST_CPU_DEVICES"], other["MINE"]) == ("3", "a=b")
        assert other["PYTHONUNBUFFERED"] == "1"

    def test_a_module(self, tmp_path):
        write(tmp_path, "print(__name__, sys.argv[1:])", "some_module.py")
        path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split()])
        done = finish("run", "-n", 1, "-m", "some_module", "-m", "x", PYTHONPATH=path)
        assert (done.returncode, said(done)) == (0, "")
        assert done.stdout == "[worker 0/1] __main__ ['-m', 'x']\n"

    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            (["run"], 2, "SCRIPT"),
            *((["run", "-n", text, "x.py"], 2, "--workers") for text in (0, "3:2", "a:2", "1:2:3")),
            (["run", "--env", "NAME", "x.py"], 2, "NAME=VALUE"),
            (["run", "--workers", 5, "--hosts", "a:2,b:2", "x.py"], 1, "hosts=['a:2,b:2']"),
            (["run", "no_such_script.py"], 2, "no_such_script.py"),
            (
                ["run", "--env", "KERAS_BACKEND=pytorch", "x.py"],
                1,
                "Set the variable KERAS_BACKEND",
            ),
            (["run", "--python", "no-such-python", "x.py"], 127, "no-such-python"),
        ],
    )
    def test_what_cannot_be_started(self, arguments, code, words):
        done = finish(*arguments, COLUMNS="200")
        assert done.returncode == code
        assert words in done.stderr
        assert "Traceback" not in done.stderr

    def test_an_option_behind_the_script_is_the_scripts_and_kerasdist_says_so(self, tmp_path):
        script = write(tmp_path, "print(sys.argv[1:])")
        done = finish("run", script, "--workers", 2, "--logs=x", "--lr", 1)
        assert done.stdout == "[worker 0/1] ['--workers', '2', '--logs=x', '--lr', '1']\n"
        warnings = [line for line in done.stderr.splitlines() if "warning" in line]
        assert [re.findall("--[a-z]+", line)[0] for line in warnings] == ["--workers", "--logs"]
        # A loader's workers beside kerasdist's are no mistake.
        done = finish("run", "-n", 1, script, "--workers", 2)
        assert (done.returncode, said(done)) == (0, "")

    def test_the_version(self):
        assert finish("--version").stdout == f"kerasdist {kerasdist.__version__}\n"

    def test_no_warning_where_the_workers_have_joined(self):
        done = finish("run", "-n", 2, "-m", "tests.multiprocess.job_script", "wait_at_exit")
        assert (done.returncode, said(done)) == (0, "")


class TestFailure:
    def test_a_worker_that_ignores_sigterm_is_killed(self, tmp_path, capfd):
        body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
mark(f"ready{rank}")
wait_for("ready0", "ready1")
if rank: sys.exit(3)
time.sleep(60)
"""
        began = time.monotonic()
        result = run(tmp_path, body, stop_seconds=0.5)
        assert time.monotonic() - began < 10
        assert result.exit_code == 3
        assert result.attempts[0].endings[0].exit_code == 137
        assert "worker 0/2 did not stop within 0.5 s, and was killed" in capfd.readouterr().err

    @pytest.mark.parametrize("workers", ["1:1", 2])
    def test_a_worker_is_stopped_that_is_alone_or_has_not_joined(self, tmp_path, workers):
        """Nobody else misses its signs of life."""
        body = """
if restart == 0:
    if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
"""
        call = ("run", "--workers", workers, "--max-restarts", 1, write(tmp_path, body))
        done = finish(*call, KERASDIST_HEARTBEAT_TIMEOUT="1")
        assert done.returncode == 0, done.stderr
        assert re.search(r"worker 0/\d failed after .* s: ended by SIGKILL", done.stderr)
        assert re.search(
            r"\| kerasdist: this worker, process \d+, was stopped for 1 s", done.stderr
        ), done.stderr

    def test_what_a_worker_leaves_behind_is_ended(self, tmp_path):
        body = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(here / "child").write_text(str(child.pid))
"""
        began = time.monotonic()
        assert run(tmp_path, body, workers=1).exit_code == 0
        assert time.monotonic() - began < 10  # the child holds the worker's output open
        assert left_after(wait_for(tmp_path, "child"), 2) == []


class TestRestart:
    def test_the_job_starts_again_until_it_succeeds(self, tmp_path, capfd):
        body = """
print(restart, os.environ["KERASDIST_COORDINATOR"])
sys.exit(0 if restart == 2 or rank == 0 else 5)
"""
        result = run(tmp_path, body, max_restarts=5)
        assert (result.exit_code, result.restarts) == (0, 2)
        output = capfd.readouterr()
        lines = [line.split()[2:] for line in output.out.splitlines()]
        assert sorted(number for number, _ in lines) == ["0", "0", "1", "1", "2", "2"]
        assert len({address for _, address in lines}) == 3
        assert "(restart 2 of 5)" in output.err

    def test_a_preemption_is_no_failure(self, tmp_path, capfd):
        body = f"time.sleep(0.7 * rank); sys.exit({int(ExitCode.PREEMPTED)})"
        result = run(tmp_path, body, max_restarts=3)
        assert (result.exit_code, result.restarts) == (ExitCode.PREEMPTED, 0)
        output = capfd.readouterr().err
        assert "preempted" in output
        assert "failed" not in output


class TestLogs:
    def test_a_file_an_attempt_and_worker_and_the_last_state(self, tmp_path, capfd):
        logs = tmp_path / "some" / "logs"
        body = """
print("out", restart, flush=True)
print("err", file=sys.stderr)
if rank:
    from kerasdist.job.launcher import channel
    channel().tell({"workers": 1, "phase": "training", "epoch": 3, "epochs": 4, "step": 1})
    time.sleep(0.5)
    sys.exit(1)
time.sleep(60)
"""
        result = run(tmp_path, body, logs=logs, max_restarts=1)
        assert (result.exit_code, result.restarts) == (1, 1)  # no more than are allowed
        assert sorted(each.name for each in logs.iterdir()) == [
            *(f"attempt-{number}-worker-{rank}.log" for number in (0, 1) for rank in (0, 1)),
            "status.json",
        ]
        assert (logs / "attempt-1-worker-0.log").read_text() == "out 1\nerr\n"
        workers = json.loads((logs / "status.json").read_text())["workers"]
        assert [one["phase"] for one in workers] == ["ended", "ended"]
        assert [one["exit_code"] for one in workers] == [143, 1]
        assert workers[1]["epoch"] == 3
        output = capfd.readouterr()
        assert output.out == ""
        assert "  | out 1" in output.err
        assert str(logs / "attempt-1-worker-1.log") in output.err


class TestOutput:
    def test_both_streams_long_lines_and_bars(self, tmp_path, capfd):
        body = """
sys.stdout.write("1/2\\r2/2\\r\\nend without newline")
sys.stderr.buffer.write(b"\\xff broken\\n")
sys.stderr.write("x" * 200_000 + "\\n")
"""
        assert run(tmp_path, body, workers=1).exit_code == 0
        output = capfd.readouterr()
        assert output.out.splitlines() == [
            f"[worker 0/1] {line}" for line in ("2/2", "end without newline")
        ]
        _, broken, *long = output.err.splitlines()
        assert broken == "[worker 0/1] \ufffd broken"
        assert "".join(line.removeprefix("[worker 0/1] ") for line in long) == "x" * 200_000

    def test_a_progress_bar_is_shown_now_and_then_and_at_its_end(
        self, tmp_path, capfd, monkeypatch
    ):
        """As Keras draws it: 20 times a second, with backspaces and a carriage return."""
        monkeypatch.setattr(worker, "REDRAW_SECONDS", 0.5)
        body = """
for step in range(1, 61):
    sys.stdout.write("\\b" * 9 + "\\r" + f"{step}/60 bär")
    sys.stdout.flush()
    time.sleep(0.02)
print()
"""
        assert run(tmp_path, body, workers=1).exit_code == 0
        lines = capfd.readouterr().out.splitlines()
        assert 2 <= len(lines) <= 4, lines  # 1.2 s, and the end
        assert lines[-1] == "[worker 0/1] 60/60 bär"
        assert all(re.fullmatch(r"\[worker 0/1\] \d+/60 bär", line) for line in lines)

    def test_a_reader_that_goes_away_stops_nobody(self, tmp_path):
        body = "print('x' * 300_000, flush=True); mark('done')"
        with started("run", "-n", 1, write(tmp_path, body)) as launcher:
            launcher.stdout.close()
            wait_for(tmp_path, "done")
            assert launcher.wait(20) == 0

    def test_letters_that_the_screen_does_not_have(self, tmp_path):
        body = "sys.stdout.reconfigure(encoding='utf-8'); print('größe ✓')"
        done = finish("run", "-n", 1, write(tmp_path, body), PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stdout) == (0, "[worker 0/1] gr\\xf6\\xdfe \\u2713\n")


class TestLibrary:
    def test_a_worker_that_cannot_be_started_ends_the_others(self, tmp_path, monkeypatch):
        def second_fails(begun, *others):
            if begun.rank == 1:
                wait_for(tmp_path, "pid0")
                begun = dataclasses.replace(begun, command=["/no/such/program"])
            return worker.Worker(begun, *others)

        monkeypatch.setattr(launch_job, "Worker", second_fails)
        with pytest.raises(FileNotFoundError):
            run(tmp_path, "mark(f'pid{rank}'); time.sleep(60)")
        assert left_after(wait_for(tmp_path, "pid0"), 1) == []

    def test_another_thread_can_stop_it(self, tmp_path):
        path = write(tmp_path, "mark(f'pid{rank}'); time.sleep(60)")
        launcher = Launcher(JobSpec(python_command(str(path)), workers=2))
        results = []
        thread = threading.Thread(target=lambda: results.append(launcher.run()))
        thread.start()
        wait_for(tmp_path, "pid0", "pid1")
        launcher.stop()
        thread.join(20)
        assert results[0].exit_code == 143
        assert not results[0].attempts[0].failed

    def test_it_leaves_the_signal_handlers_as_they_were(self, tmp_path):
        before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        run(tmp_path, "pass", workers=1)
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("given", [None, "7"])
def test_threads_are_shared_by_the_workers_of_a_machine(given):
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    code = "import os; print(os.environ['OMP_NUM_THREADS'])"
    spec, slot = JobSpec((sys.executable, "-c", code)), Slot(None, 0, 0, 2)
    environ |= {} if given is None else {"OMP_NUM_THREADS": given}
    with supervised(start.orders_of(spec, slot, {}), env=environ) as process:
        output = process.stdout.read()
        assert process.wait(20) == 0
    assert int(output) == int(given or max(1, supervisor.cores() // 2))


def test_the_supervisor_does_not_keep_the_coordinators_port_open():
    """A worker that has ended, or has closed it, leaves nobody who listens."""
    code = "import os, sys, time\nos.close(int(sys.argv[1]))\nprint('closed', flush=True)\n"
    code += "time.sleep(60)"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, number = listener.getsockname()[1], str(listener.fileno())
        spec = JobSpec((sys.executable, "-c", code, number))
        orders = start.orders_of(spec, Slot(None, 0, 0, 1), {})
        orders["inherited"].append(listener.fileno())
        process = supervised(orders, pass_fds=[listener.fileno()])
    with process:
        assert process.stdout.readline() == "closed\n"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        process.stdin.close()  # the launcher is gone
        assert process.wait(20) != 0
