"""Each name of TensorFlow's pages is here, or refused with advice; the page says so."""

import json

from tests.facade import seeds
from tests.fresh import run_forked

CODE = """
import json
from tests.facade import names, seeds
missing = [f"{one.place} {one.name}" for one in names.listed() if one.is_missing]
print(json.dumps([missing, seeds.written()]))
"""


def test_names_of_tensorflow_are_here_or_refused_with_advice():
    missing, page = found()
    said = "add it to kerasdist, or to the table of kerasdist/core/earlier_names.py"
    assert missing == [], said
    assert seeds.PAGE.read_text(encoding="utf-8") == page, "run python -m tests.facade.seeds"


def found():
    return json.loads(run_forked(CODE, "tensorflow").splitlines()[-1])
