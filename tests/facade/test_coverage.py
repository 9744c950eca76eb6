"""Every example of tf.distribute's docstrings has a case on every backend, or a reason."""

from tests.conformance import registry
from tests.facade import coverage
from tests.fresh import run_fresh

FOUND = [name for file in coverage.FILES for name in coverage.examples(file)]
EXAMPLES = set(FOUND)


def test_examples_are_found():
    assert len(EXAMPLES) == len(FOUND) >= 60
    assert (
        coverage.count("text\n```python\na\n\nb\n```\n>>> a\n... b\n1\n\n>>> c\n```\nd\n```") == 4
    )
    assert coverage.count("no code\n... at all") == 0


def test_every_file_with_examples_is_known():
    outside = {file for files in coverage.OUTSIDE.values() for file in files}
    known = {file for file in coverage.FILES if not file.startswith("../")} | outside
    assert coverage.files_with_examples() - known == set(), "add it to coverage.FILES, or OUTSIDE"
    assert outside <= coverage.files_with_examples()


def test_every_example_has_a_case_or_a_reason():
    missing = EXAMPLES - set(coverage.cases()) - coverage.NOT_COVERED.keys()
    assert not missing, "write a case for it, or give the reason in tests/facade/coverage.py"


def test_no_example_has_both_and_no_reason_has_lost_its_example():
    assert not set(coverage.cases()) & coverage.NOT_COVERED.keys()
    assert not coverage.NOT_COVERED.keys() - EXAMPLES
    assert not set(coverage.cases()) - EXAMPLES


def test_cases_of_examples_run_on_every_backend():
    partly = {k for k, v in coverage.cases().items() if set(v.backends) != set(registry.BACKENDS)}
    assert not partly


def test_reading_the_cases_imports_no_framework():
    code = """
from tests.conformance import registry
registry.load("tests.facade")
import sys
print(*{"keras", "tensorflow", "jax", "torch"} & set(sys.modules))
"""
    assert run_fresh(code).split() == []
