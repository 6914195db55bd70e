"""Files that appear under their name only when all of them is on disk."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

HALF_WRITTEN = ".tmp"
"""What is added to the name of a file that is still being written."""


@contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """Write `path`: it is whole when the block ends, and as before if the block raises."""
    temporary = path.with_name(path.name + HALF_WRITTEN)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to disk: without it a rename may be lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
