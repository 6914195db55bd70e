"""A checksum over the footer of a Parquet file, which the format itself lacks.

Pages carry checksums of their own. The footer (schema, offsets, metadata) has none, and a reader
that trusts a changed one may crash, or read something else in silence. So its metadata holds the
SHA-256 of the whole footer, taken with zeros in the place of the digest.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

SEAL = "agentrl_footer_sha256"
"""The key of the metadata."""
UNSEALED = "agentrl-footer-sha256:" + "0" * 64
"""Its value while the file is written."""

_MARK = UNSEALED[:-64].encode()
_MAGIC = b"PAR1"


def seal(path: Path) -> None:
    """Put the digest into a finished file. Raises ValueError if it was not written for one."""
    with path.open("r+b") as file:
        begin, footer = _footer(file)
        place = footer.rfind(_MARK)
        if place < 0:
            raise ValueError(f"{path} has no place for a seal")
        file.seek(begin + place + len(_MARK))
        file.write(_digest(footer, place).encode())


def is_sealed(path: Path) -> bool:
    """Whether the footer has a digest. Raises ValueError when it was changed since."""
    with path.open("rb") as file:
        _, footer = _footer(file)
    place = footer.rfind(_MARK)
    if place < 0:
        return False
    found = footer[place + len(_MARK) : place + len(UNSEALED)]
    if found != _digest(footer, place).encode():
        raise ValueError("its footer was changed")
    return True


def _footer(file: BinaryIO) -> tuple[int, bytes]:
    """Where the footer begins, and its bytes. Raises ValueError for what is no Parquet file."""
    size = file.seek(0, 2)
    if size < 12:
        raise ValueError("it is too short")
    file.seek(size - 8)
    tail = file.read(8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or length > size - 12:
        raise ValueError("it has no Parquet footer")
    file.seek(size - 8 - length)
    return size - 8 - length, file.read(length)


def _digest(footer: bytes, place: int) -> str:
    begin = place + len(_MARK)
    blank = footer[:begin] + b"0" * 64 + footer[begin + 64 :]
    return hashlib.sha256(blank).hexdigest()
