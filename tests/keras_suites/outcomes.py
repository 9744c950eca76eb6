"""What Keras's tests gave, under the strategy and in plain Keras, and what differs."""

import collections
import re
from dataclasses import dataclass

from tests.keras_suites.exceptions import EXCEPTIONS, reason


@dataclass(frozen=True)
class Outcome:
    """``passed``, ``failed``, ``skipped``, or ``died``: the process ended under it."""

    outcome: str
    message: str = ""


def error_of(one: Outcome) -> str:
    """The last line of an error's own that pytest shows."""
    told = [line[2:].strip() for line in one.message.splitlines() if line.startswith("E ")]
    last = next((line for line in reversed(told) if line), one.outcome)
    return re.sub(r"\S*/keras/src/", "keras/src/", last)


@dataclass(frozen=True)
class Comparison:
    """The outcomes of the tests here; of those that did not pass, also those in plain Keras."""

    backend: str
    ours: dict[str, Outcome]
    plain: dict[str, Outcome]

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
            if one.outcome not in ("passed", "skipped") and self._of_plain(test) == "skipped"
        }

    @property
    def failed_by_both(self) -> dict[tuple[str, str], int]:
        return collections.Counter(
            (test.partition("::")[0], error_of(one))
            for test, one in sorted(self.ours.items())
            if one.outcome not in ("passed", "skipped")
            and self._of_plain(test) not in ("passed", "skipped")
        )

    def _of_plain(self, test: str) -> str:
        """A process that died, perhaps for lack of time, excuses nothing."""
        outcome = self.plain[test].outcome if test in self.plain else "died"
        return "passed" if outcome == "died" else outcome

    def _lost(self) -> dict[str, Outcome]:
        return {
            test: one
            for test, one in self.ours.items()
            if one.outcome != "passed" and self._of_plain(test) == "passed"
        }

    def counts(self) -> list[int]:
        """Passed, skipped and failed tests: plain Keras's, then ours."""
        return [
            number
            for side in (
                [self._of_plain(test) for test in self.ours],
                [one.outcome for one in self.ours.values()],
            )
            for passed, skipped in [(side.count("passed"), side.count("skipped"))]
            for number in (passed, skipped, len(side) - passed - skipped)
        ]
