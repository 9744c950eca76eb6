"""An interrupt is heard, even where code drops it that drops errors."""

import pytest

from tests.fresh import run_fresh

SCRIPT = """
import os, signal, sysconfig
from pathlib import Path
from kerasdist.job import interruption

def function(name, folder, body):
    lines = "".join(f"    {line}\\n" for line in body)
    exec(compile(f"def {name}(call):\\n{lines}", f"{folder}/{name}.py", "exec"), globals())
    return globals()[name]

class Dropping:
    def __del__(self):  # Python drops what is raised here
        os.kill(os.getpid(), signal.SIGINT)

DROPS = ["try:", "  call()", "except KeyboardInterrupt: pass"]
FUNCTIONS = {
    "ours": function("calls", Path(interruption.__file__).parent, ["call()"]),
    "framework": function("drops", sysconfig.get_path("stdlib"), DROPS),
    "user": function("catches", "/home/user", DROPS),
    "garbage": lambda _: Dropping(),
}
call = lambda: os.kill(os.getpid(), signal.SIGINT)
for name in reversed(STACK):
    call = lambda function=FUNCTIONS[name], call=call: function(call)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
dropped = interruption.DroppedInterrupts(lambda: IN_A_CALL)
try:
    call()
    dropped.raise_again()
    print("goes on")
except KeyboardInterrupt:
    print("raised again")
dropped.raise_again()  # once
"""


@pytest.mark.parametrize(
    ("stack", "in_a_call", "expected"),
    [
        (["ours", "framework"], True, "raised again"),
        (["user", "ours", "framework"], True, "raised again"),
        (["ours", "user"], True, "goes on"),
        (["ours", "user", "framework"], True, "goes on"),
        (["ours", "framework"], False, "goes on"),
        (["garbage"], False, "raised again"),
    ],
)
def test_what_code_has_dropped_is_raised_again(stack, in_a_call, expected):
    script = SCRIPT.replace("STACK", repr(stack)).replace("IN_A_CALL", repr(in_a_call))
    assert run_fresh(script).strip() == expected
