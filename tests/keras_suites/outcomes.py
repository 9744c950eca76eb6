"""What Keras's tests gave, under the strategy and in plain Keras, and what differs."""

import collections
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.keras_suites.exceptions import EXCEPTIONS, reason


@dataclass(frozen=True)
class Outcome:
    """``passed``, ``failed``, ``skipped``, or ``died``: the process ended under it."""

    outcome: str
    seconds: float = 0.0
    message: str = ""


def error_of(one: Outcome) -> str:
    """The last line of an error's own that pytest shows."""
    told = [line[2:].strip() for line in one.message.splitlines() if line.startswith("E ")]
    last = next((line for line in reversed(told) if line), one.outcome)
    return re.sub(r"\S*/keras/src/", "keras/src/", last)


def file_of(test: str) -> str:
    return test.partition("::")[0]


@dataclass(frozen=True)
class Record:
    """What plain Keras gave for the tests of one file: all but the named ones passed.

    Attributes:
        count: How many tests the file has.
        others: The tests that did not pass, by outcome.
    """

    count: int
    others: dict[str, list[str]]

    @classmethod
    def of(cls, outcomes: dict[str, Outcome]) -> "Record":
        others: dict[str, list[str]] = {}
        for test, one in sorted(outcomes.items()):
            if one.outcome != "passed":
                others.setdefault(one.outcome, []).append(test.partition("::")[2])
        return cls(len(outcomes), others)

    def outcomes(self, file: str, tests: Sequence[str], *, whole: bool = True) -> dict[str, str]:
        """The outcome of each test; of a whole file also one for tests that are not there."""
        known = {f"{file}::{name}": kind for kind, names in self.others.items() for name in names}
        found = {test: known.get(test, "passed") for test in tests}
        if not whole:
            return found
        found |= known
        if len(tests) < self.count:
            found[f"{file}::({self.count - len(tests)} tests are missing)"] = "passed"
        return found


@dataclass(frozen=True)
class Comparison:
    backend: str
    plain: dict[str, str]
    ours: dict[str, Outcome]

    @property
    def worse(self) -> dict[str, str]:
        """What plain Keras passes and we don't, without the named exceptions."""
        return {
            test: f"{one.outcome}: {one.message}"
            for test, one in self._lost().items()
            if reason(self.backend, test) is None
        }

    @property
    def excused(self) -> dict[str, str]:
        """What plain Keras passes and we need not, with the reasons."""
        reasons = {test: reason(self.backend, test) for test in self._lost()}
        return {test: why for test, why in reasons.items() if why is not None}

    @property
    def idle_exceptions(self) -> list[str]:
        """Exceptions that are none any more: the list must not outlive its reasons."""
        lost = self._lost()
        return [
            begin
            for begin in EXCEPTIONS.get(self.backend, {})
            if any(test.startswith(begin) for test in self.ours)
            and not any(test.startswith(begin) for test in lost)
        ]

    @property
    def beyond_plain(self) -> dict[str, str]:
        """What fails here and plain Keras did not run, two devices being one more than it had."""
        return {
            test: error_of(one)
            for test, one in sorted(self.ours.items())
            if one.outcome not in ("passed", "skipped") and self.plain[test] == "skipped"
        }

    @property
    def failed_by_both(self) -> dict[tuple[str, str], int]:
        """How many tests of a file plain Keras does not pass either, by the error."""
        return collections.Counter(
            (file_of(test), error_of(one))
            for test, one in sorted(self.ours.items())
            if one.outcome not in ("passed", "skipped")
            and self.plain[test] not in ("passed", "skipped")
        )

    def _lost(self) -> dict[str, Outcome]:
        missing = Outcome("missing", message="plain Keras ran it, we did not")
        found = {test: self.ours.get(test, missing) for test in self.plain}
        return {
            test: one
            for test, one in found.items()
            if self.plain[test] == "passed" and one.outcome != "passed"
        }

    def counts(self) -> list[int]:
        """Passed, skipped and failed tests: plain Keras's, then ours."""
        return [
            number
            for side in (list(self.plain.values()), [one.outcome for one in self.ours.values()])
            for passed, skipped in [(side.count("passed"), side.count("skipped"))]
            for number in (passed, skipped, len(side) - passed - skipped)
        ]
