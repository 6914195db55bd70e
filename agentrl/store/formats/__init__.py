"""Trajectories as other programs write and read them: JSON lines, one trajectory each."""

from agentrl.store.formats.lines import FORMATS, export_lines, import_lines

__all__ = ["FORMATS", "export_lines", "import_lines"]
"""FORMATS names them: openai, atif, verifiers, trl, verl."""
