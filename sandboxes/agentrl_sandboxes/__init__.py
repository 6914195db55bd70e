"""Sandbox backends: plug-ins that import only `agentrl`."""
