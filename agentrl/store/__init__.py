"""Trajectories on disk: one Parquet file a step, written whole or not at all."""

from agentrl.store.parquet import (
    ParquetStore,
    read_columns,
    read_facts,
    read_file,
    read_group,
    write_file,
)
from agentrl.store.redaction import Redactor, secret_values

__all__ = [
    "ParquetStore",
    "Redactor",
    "read_columns",
    "read_facts",
    "read_file",
    "read_group",
    "secret_values",
    "write_file",
]
