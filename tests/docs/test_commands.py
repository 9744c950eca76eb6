"""The commands of README and docs exist: kerasdist's are parsed, make's are targets."""

import re
import shlex
import subprocess

import pytest
import typer

from kerasdist.cli.app import app
from tests.docs.blocks import all_blocks, pages
from tests.fresh import ROOT

COMMAND = typer.main.get_command(app)
SHELL = ("sh", "bash", "shell", "console")
# What may stand before the command: a prompt, variables, a scheduler's launcher.
_BEFORE = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:srun (?:-\S+ )*)?(?:python3? -m )?")


def lines():
    """The lines of the shell blocks and the code in the text, with the place of each."""
    for block in all_blocks():
        if block.language in SHELL:
            for line in block.text.replace("\\\n", " ").splitlines():
                yield block.place, line
    for page in pages():
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
        for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
            yield page, code


COMMANDS = [
    pytest.param(shlex.split(command, comments=True)[1:], id=f"{place} {line}")
    for place, line in lines()
    if (command := _BEFORE.sub("", line)).startswith("kerasdist ")
    and "..." not in command
    # In a sentence also the name alone, such as that of `kerasdist plan`.
    and not re.fullmatch(r"kerasdist \w+", command)
]
TARGETS = {word for _, line in lines() for word in re.findall(r"^(?:\$ )?make ([a-z-]+)", line)}


def parse(words):
    """Parses a command as the program does, without running it."""
    try:
        context = COMMAND.make_context("kerasdist", list(words))
    except typer.Exit:  # of --version and --help
        return
    if context.args or context._protected_args:
        given = [*context._protected_args, *context.args]
        name, command, rest = COMMAND.resolve_command(context, given)
        # `kerasdist run --workers 2` in a sentence leaves the script out; more words are arguments.
        script = ["train.py"] if name == "run" else []
        command.make_context(name, [*rest, *script], parent=context)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_kerasdist_is_one(words):
    parse(words)


def test_an_option_that_does_not_exist_is_found():
    with pytest.raises(Exception, match="No such option: --worker-count"):
        parse(["run", "--worker-count", "2", "train.py"])


def test_there_are_commands():
    assert len(COMMANDS) > 20
    assert {"test", "demo"} <= TARGETS


def test_the_targets_of_make_exist():
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert made >= TARGETS


def test_everything_runs_each_file_that_has_more_there():
    command = ["make", "-n", "test-rest", "test-in-part", "test-of-workers"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    there = tuple(re.findall(r"tests/[\w/.]+", printed))
    more = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^from tests.environment import .*everything", path.read_text("utf-8"), re.M)
    ]
    assert more
    assert [path for path in more if not path.startswith(there)] == []
