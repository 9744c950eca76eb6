"""An interrupt is heard, wherever it comes."""

from tests.fresh import run_fresh

SCRIPT = """
import os, signal, time
from kerasdist.job import interruption

interruption.hear_what_is_dropped()

class Dropping:
    def __del__(self):  # Python drops what is raised here
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

try:
    Dropping()
    time.sleep(5)
    print("not heard")
except KeyboardInterrupt:
    print("heard")
"""


def test_an_interrupt_is_heard_that_came_in_code_that_drops_errors():
    assert run_fresh(SCRIPT).split() == ["heard"]
