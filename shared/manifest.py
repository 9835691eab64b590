"""What a directory of a checkpoint or an export holds, so that damage is found before it is loaded.

``manifest.json`` has what is known of the state and, under ``files``, the size and SHA-256 of every file beside it.
``manifest.sha256`` has the manifest's own digest, in the form that ``sha256sum --check`` reads. A directory is filled
under a name that nobody reads, sealed, and renamed: one that has its name is whole, whatever happened to the process
that wrote it; and one that is whole and differs from its manifest was damaged since.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.errors import UserError
from shared.run_directory import writing

FORMAT = 2
"""Version of the layout of checkpoints and exports."""

MANIFEST = "manifest.json"
DIGEST = "manifest.sha256"


class Damaged(Exception):
    """A directory does not hold what was written into it; says what is wrong with which file."""


def seal(directory: Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of all files below the directory, and wait until all of it is on the disk."""
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    manifest = directory / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, **facts, "files": files}, indent=2) + "\n")
    (directory / DIGEST).write_text(_digest_line(manifest))
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


@contextmanager
def filling(directory: Path) -> Iterator[Path]:
    """A new directory to fill, which gets that name when all went well and is gone when not.

    Raises UserError where something is there already, and where it cannot be written.
    """
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{directory}: is not empty; choose another name")
    draft = directory.with_name(f".partial-{directory.name}")
    with writing(directory):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            yield draft
            publish(draft, directory)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def publish(partial: Path, final: Path) -> None:
    """Give a sealed directory its name; what had that name before is gone only when the new one is there."""
    before = final.with_name(f".partial-{final.name}-before")
    if final.exists():
        os.replace(final, before)
    os.replace(partial, final)
    _sync(final.parent)
    shutil.rmtree(before, ignore_errors=True)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest. Raises Damaged, or UserError for a directory that another version wrote."""
    manifest = directory / MANIFEST
    try:
        stated, text = (directory / DIGEST).read_bytes(), manifest.read_bytes()
    except OSError as error:
        raise Damaged(f"{Path(str(error.filename)).name} cannot be read: {error.strerror}") from None
    if stated != _digest_line(manifest).encode():
        raise Damaged(f"{MANIFEST} and {DIGEST} do not belong together")
    found: dict[str, Any] = json.loads(text)
    if found["format"] != FORMAT:
        remedy = "install a newer jaxtrain" if found["format"] > FORMAT else "only an older jaxtrain reads it"
        raise UserError(f"{manifest}: has format {found['format']}, and this version reads format {FORMAT}; {remedy}")
    return found


def verify(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Raise Damaged unless every file is as the manifest says."""
    for name, expected in manifest["files"].items():
        path = directory / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise Damaged(f"{name} has {size:,} bytes and should have {expected['bytes']:,}")
            if _digest(path) != expected["sha256"]:
                raise Damaged(f"{name} has another SHA-256 than the manifest says")
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from None


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_line(manifest: Path) -> str:
    return f"{_digest(manifest)}  {MANIFEST}\n"


def _sync(path: Path) -> None:
    """Wait until a file or directory is on the disk, so that the rename that follows cannot overtake it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
