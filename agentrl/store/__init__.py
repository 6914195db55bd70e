"""Trajectories on disk: one Parquet file a step, written whole or not at all."""

from agentrl.store.parquet import ParquetStore, read_facts, read_file, write_file
from agentrl.store.redaction import Redactor, secret_values

__all__ = ["ParquetStore", "Redactor", "read_facts", "read_file", "secret_values", "write_file"]
