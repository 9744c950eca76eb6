"""Which programs can be started again, and by which command."""

import sys
import sysconfig
from types import ModuleType

import pytest

from kerasdist.strategies import processes
from tests.fresh import ROOT
from tests.multiprocess.launching import ended

ASK = "from kerasdist.strategies.processes import *; print(why_not_again(), '|', why_not_unasked())"


def asked(*arguments, text=""):
    return ended([sys.executable, *arguments], text=text).stdout.strip().split(" | ")


@pytest.mark.parametrize("way", ["spawn", "forkserver", "fork"])
def test_what_multiprocessing_starts_is_no_script(tmp_path, way):
    (tmp_path / "train.py").write_text(f"""
import multiprocessing, sys
sys.path.insert(0, {str(ROOT)!r})
from kerasdist.strategies import processes
at_import = processes.is_child()  # in a new interpreter the script is imported again
def child():
    assert processes.is_child()
    sys.exit(7 + at_import)
if __name__ == "__main__":
    assert not at_import
    process = multiprocessing.get_context({way!r}).Process(target=child)
    process.start()
    process.join(60)
    print(process.exitcode)
""")
    assert asked(str(tmp_path / "train.py")) == ["7" if way == "fork" else "8"]


@pytest.mark.parametrize(
    ("arguments", "text"), [(["-c", ASK], ""), (["-"], ASK), (["-i", "-q"], ASK)]
)
def test_what_has_no_file_cannot(arguments, text):
    assert "an interactive interpreter" in asked(*arguments, text=text)[0]


@pytest.mark.parametrize("name", ["purelib", "stdlib", "scripts"])
def test_a_program_that_is_not_the_users_own_is_not_started_unasked(monkeypatch, name):
    main = ModuleType("__main__")
    main.__file__ = f"{sysconfig.get_path(name)}/pytest/__main__.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert "not a script of yours" in str(processes.why_not_unasked())
