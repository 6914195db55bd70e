"""Trajectories on disk: one Parquet file a step, written whole or not at all."""

from agentrl.store.parquet import ParquetStore
from agentrl.store.redaction import secret_values

__all__ = ["ParquetStore", "secret_values"]
