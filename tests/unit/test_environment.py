"""What tests set in the environment of frameworks stands in one file."""

import re

from tests.environment import ALL, ROOT, of_users

# About the variables themselves: what a launcher gives its workers, what a compiler is told.
ABOUT_THEM = (
    "tests/accelerators/",
    "tests/ahead_of_time/",
    "tests/environment.py",
    "tests/integrations/slurm/",
    "tests/multiprocess/test_launch.py",
    "tests/multiprocess/test_launch_function.py",
    "tests/unit/cluster/",
    "tests/unit/launch/",
    "tests/unit/plan/",
)
# Whatever else changes how a framework computes.
OTHERS = ("TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


def test_settings_stand_in_one_place():
    names = "|".join([*(one.name for one in ALL), *OTHERS])
    given = re.compile(rf"""(["']({names})["']\s*[:\],])|\b({names})=["']""")
    files = [*(ROOT / "tests").rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        for match in given.finditer(path.read_text("utf-8"))
        if not str(path.relative_to(ROOT)).startswith((*ABOUT_THEM, "tests/unit/test_environment"))
    ]
    exported = re.findall(rf"export ({names})", (ROOT / "Makefile").read_text("utf-8"))
    assert (found, exported) == ([], [])


def test_users_have_none_of_it(monkeypatch):
    for setting in ALL:
        assert setting.reason
        monkeypatch.setenv(setting.name, setting.value)
    monkeypatch.setenv("KERASDIST_RANK", "1")
    environment = of_users()
    assert not {setting.name for setting in ALL} & set(environment)
    assert environment["KERASDIST_RANK"] == "1"
