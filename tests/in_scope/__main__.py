"""``python -m tests.in_scope torch [pattern ...]``: for work on a few cases."""

from tests.conformance import runner

runner.main(__package__)
