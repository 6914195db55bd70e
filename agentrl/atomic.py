"""Files and folders that appear under their name only when all of them is on disk."""

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

HALF_WRITTEN = ".tmp"
"""What is added to the name of a file that is still being written."""
PARTIAL, OLD = ".partial-", ".old-"
"""How the names begin of a folder that is being written, and of one that is being removed."""


@contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """Write `path`: it is whole when the block ends, and as before if the block raises.

    Raises OSError that names `path`.
    """
    temporary = path.with_name(path.name + HALF_WRITTEN)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # a full disk is reported without a name
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # what went wrong is on its way up already
            temporary.unlink()


@contextmanager
def whole_folder(path: Path) -> Generator[Path]:
    """A new folder to fill; it becomes `path` when the block ends, in the place of an earlier one.

    If the block raises, all is as before. However the process dies, `path` is whole or absent.
    Raises OSError that names `path`, whatever the block raised: each library that writes models
    has an error of its own for a full disk.
    """
    partial = path.with_name(f"{PARTIAL}{path.name}-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        _sync_tree(partial)
        remove_folder(path)
        os.replace(partial, path)
        sync_folder(path.parent)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _unwritten(path, error) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder, if it is there; it loses its name before its files."""
    if path.exists():
        old = path.with_name(f"{OLD}{path.name}-{os.getpid()}")
        os.replace(path, old)
        shutil.rmtree(old, ignore_errors=True)


def _unwritten(path: Path, error: Exception) -> OSError:
    if isinstance(error, OSError) and error.strerror:
        return OSError(error.errno, error.strerror, str(path))
    above = next(folder for folder in path.absolute().parents if folder.exists())
    free_mib = shutil.disk_usage(above).free >> 20
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return OSError(
        errno.EIO, f"it can't be written, with {free_mib} MiB free there ({reason})", str(path)
    )


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to disk: without it a rename may be lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
