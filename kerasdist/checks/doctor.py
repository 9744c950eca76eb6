"""What the command ``kerasdist doctor`` does."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from kerasdist.checks import findings, hosts, machine
from kerasdist.checks.findings import Finding


def run(names: Sequence[str], *, as_json: bool) -> bool:
    """Looks at this machine, or at hosts, and prints what it finds. Returns whether all is well.

    Raises:
        ClusterError: If the hosts are written wrongly.
        OSError: If there is no ssh.
    """
    found = hosts.look(names) if names else machine.look()
    if as_json:
        sys.stdout.write(json.dumps(findings.as_dicts(found), indent=2) + "\n")
    else:
        findings.show(", ".join(names) or "This machine", _shortened(found))
    return not findings.is_failed(found)


def _shortened(found: Sequence[Finding]) -> list[Finding]:
    """Joins a host's findings without a problem into one line."""
    shown: list[Finding] = []
    for where in dict.fromkeys(one.where for one in found):
        here = [one for one in found if one.where == where]
        well = [one for one in here if one.verdict == "ok"]
        if where and len(well) > 3:
            here = [one for one in here if one not in well]
            names = ", ".join(one.check for one in well)
            shown.append(Finding(f"{len(well)} checks", "ok", names, "--json shows each.", where))
        shown += here
    return shown
