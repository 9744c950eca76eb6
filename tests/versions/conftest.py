"""Writes the results with Keras's nightly at the end of a run's log, passed or not."""

SAID: list[str] = []


def pytest_terminal_summary(terminalreporter):
    if SAID:
        terminalreporter.section("Keras's nightly")
        terminalreporter.write_line("\n".join(SAID))
