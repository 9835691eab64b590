"""Hashes of files' content, remembered between runs.

Prepared data is found by the content it was made from. Reading a large corpus again at every start only to hash it
would take minutes, so each hash is kept beside the caches under the file's path, size, time of change and inode, and
counts as long as these stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shared.errors import UserError

SETTLED_SECONDS = 2.0
"""A file changed this recently is hashed again next time: a second change within the clock's tick would not show."""


def content_hashes(files: Sequence[Path], remembered: Path) -> list[str]:
    """One hash (32 hex digits) of the bytes of each file.

    remembered: a JSON file that holds hashes from earlier calls; it may be missing, damaged or read-only.
    """
    known = _read(remembered)
    stamps = {path: stamp_of(path) for path in files}
    keys = {path: str(path.resolve()) for path in files}
    changed = [path for path in stamps if known.get(keys[path], [])[:-1] != stamps[path]]
    if changed:
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
            fresh = dict(zip(changed, pool.map(_hash, changed), strict=True))
        recent = time.time_ns() - int(SETTLED_SECONDS * 1e9)
        _write(remembered, {keys[path]: [*stamps[path], fresh[path]] for path in changed if stamps[path][1] < recent})
    else:
        fresh = {}
    return [fresh.get(path) or known[keys[path]][-1] for path in files]


def stamp_of(path: Path) -> list[int]:
    """What changes when the file does: size, time of change in ns, inode."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _read(remembered: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(remembered.read_text())
    except (OSError, ValueError):
        return {}
    whole = isinstance(known, dict) and all(isinstance(entry, list) and len(entry) == 4 for entry in known.values())
    return known if whole else {}


def _write(remembered: Path, entries: dict[str, list[Any]]) -> None:
    """Adds entries. Of two processes that write at once one may lose its own: then it hashes once more, no harm."""
    temporary = remembered.with_name(f"{remembered.name}.{os.getpid()}")
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(_read(remembered) | entries, indent=0))
        temporary.replace(remembered)
    except OSError:  # a cache that may only be read still works
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
