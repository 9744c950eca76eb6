"""All suites share what they compile."""

from tests.environment import keep_compiled_programs

keep_compiled_programs()
