"""``python -m tests.multiprocess torch [--layout 2x1] [pattern ...]``: for work on a few cases."""

import argparse

from tests.conformance import registry
from tests.conformance.runner import BackendRun, report
from tests.multiprocess.layouts import PAIR, Layout, keys, limits

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("backend", choices=registry.BACKENDS)
parser.add_argument("patterns", nargs="*", help="parts of names; all cases without one")
parser.add_argument("--layout", type=Layout.of, default=PAIR)
parser.add_argument("-v", "--verbose", action="store_true", help="print tracebacks")
arguments = parser.parse_intermixed_args()
chosen = [
    key
    for key in keys(arguments.backend, arguments.layout)
    if not arguments.patterns or any(part in key for part in arguments.patterns)
]
run = BackendRun.of_group(arguments.backend, chosen, str(arguments.layout), limits())
report(run, arguments.verbose)
