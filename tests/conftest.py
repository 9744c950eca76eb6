"""All suites share what they compile, and print what matters."""

from tests.environment import of_all

of_all()
