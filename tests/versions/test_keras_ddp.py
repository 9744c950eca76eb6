"""Keras 3.16 trains by DistributedDataParallel wherever torch has a process group: not here, too.

The Keras that is installed gets what the next one has. With the real thing, Keras's nightly, CI
runs `test_nightly_keras.py`, and `make versions` more.
"""

import pytest

from tests.multiprocess.launching import finish

SCRIPT = "tests/versions/keras_ddp_script.py"


@pytest.mark.parametrize(
    ("of_the_script", "outside"), [(False, "[]"), (True, "['summed', 'wrapped']")]
)
def test_nothing_is_summed_twice(tmp_path, of_the_script, outside):
    """A strategy's model never; another one only in a group that the script has made."""
    given = [str(tmp_path / "group")] if of_the_script else []
    done = finish("run", "--workers", 2, SCRIPT, *given, KERAS_BACKEND="torch")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.endswith("of the strategy: []") for line in lines) == 2, lines
    assert sum(line.endswith(f"of the chief alone: {outside}") for line in lines) == 2, lines
