"""Processes that train one run together have to mean the same run: found out before the first step, and not by losses.

A wrong copy of a file or an older package on one machine would otherwise give gradients of another model, summed into
everybody's; and a process that does not see the others' checkpoints would begin from nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shared.errors import UserError


def require_agreement(said: Sequence[str]) -> None:
    """Raise UserError where a process said something else than the first; see :func:`statement`."""
    first = json.loads(said[0])
    for process, text in enumerate(said[1:], start=1):
        other = json.loads(text)
        for name in first.keys() | other.keys():
            if first.get(name) != other.get(name):
                raise UserError(
                    f"the processes do not train the same run: {name} is {first.get(name)} in process 0 and "
                    f"{other.get(name)} in process {process}; start all with the same config, files and packages"
                )


def statement(fingerprints: Mapping[str, str], step: int, versions: Mapping[str, str]) -> str:
    """What a process says of its run: its fingerprints, the step that it would go on from, its packages' versions."""
    known = {f"the fingerprint of {name.replace('_', ' ')}": value for name, value in fingerprints.items()}
    packages = {f"the version of {name}": version for name, version in versions.items()}
    return json.dumps({**known, "the step of the newest checkpoint": step, **packages})
