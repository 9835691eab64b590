"""The cache of tokenised data: one folder for each content, made whole or not at all.

    CACHE_DIR/KEY/train.bin          token ids of all training documents, little endian, each ending in end-of-text
                  train.offsets.npy  int64 [documents + 1]: where each begins in it
                  held_out.*         the same for the held-out documents
                  manifest.json      counts and origin

A folder is written under another name and renamed when complete, so whoever sees KEY sees all of it. One process
writes at a time: it holds a lock of the operating system, which goes when the process does, however it dies; what a
dead one left behind is cleared away by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
"""Version of the folder's layout and of how documents become tokens; part of every key and fingerprint."""

SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Cache:
    """Tokenised data on disk, memory-mapped."""

    folder: Path
    manifest: dict[str, Any]

    def tokens(self, split: str) -> np.ndarray:
        """Unsigned integers [N]."""
        if not self.manifest[split]["tokens"]:
            return np.zeros(0, self.manifest["dtype"])  # an empty file cannot be mapped
        return np.memmap(self.folder / f"{split}.bin", self.manifest["dtype"], mode="r").view(np.ndarray)

    def offsets(self, split: str) -> np.ndarray:
        """int64 [documents + 1]."""
        offsets: np.ndarray = np.load(self.folder / f"{split}.offsets.npy")
        return offsets


def obtain(
    cache_dir: Path, key: str, prepare: Callable[[Path], dict[str, Any]], report: Callable[[str], None]
) -> Cache:
    """The cache of this key; made by ``prepare(folder) -> manifest`` if there is none."""
    final = cache_dir / key
    found = _open(final)  # without the lock first: a finished cache may lie where nobody may write
    if found is not None:
        return found
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f"{key}.lock", report):
        found = _open(final)
        if found is not None:
            return found
        if final.exists():
            report(f"the prepared data in {final} is damaged; preparing it again")
            shutil.rmtree(final)
        _clear_left_behind(cache_dir, key)
        partial = Path(tempfile.mkdtemp(prefix=f"{key}.partial.{socket.gethostname()}.", dir=cache_dir))
        try:
            manifest = prepare(partial)
            _write_synced(partial / "manifest.json", json.dumps(manifest, indent=2) + "\n")
            partial.chmod(0o755 & ~_umask())  # mkdtemp's own folders are private
            try:
                partial.rename(final)
            except OSError:
                if not final.exists():
                    raise
                # Another machine, whose lock does not reach here, was first; its data is the same.
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        found = _open(final)
        assert found is not None
        return found


def _open(folder: Path) -> Cache | None:
    """The cache in this folder; None if there is none or if it is not what its manifest says."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        whole = manifest["format"] == FORMAT and all(
            (folder / f"{split}.bin").stat().st_size == manifest[split]["tokens"] * np.dtype(manifest["dtype"]).itemsize
            and len(np.load(folder / f"{split}.offsets.npy", mmap_mode="r")) == manifest[split]["documents"] + 1
            for split in SPLITS
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, EOFError):
        return None
    return Cache(folder, manifest) if whole else None


@contextlib.contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is preparing this data; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _clear_left_behind(cache_dir: Path, key: str) -> None:
    """Removes what dead processes left. As we hold the lock of this key, no other on this machine prepares it; other
    keys, and machines that a lock on a network's file system may not stop, count as dead after a day's silence."""
    yesterday = time.time() - 24 * 3600
    for partial in cache_dir.glob("*.partial.*"):
        with contextlib.suppress(FileNotFoundError):  # it may be completed meanwhile
            ours = partial.name.rpartition(".")[0] == f"{key}.partial.{socket.gethostname()}"
            if ours or max(path.stat().st_mtime for path in (partial, *partial.iterdir())) < yesterday:
                shutil.rmtree(partial, ignore_errors=True)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
