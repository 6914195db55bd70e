"""The built-in environments: plug-ins that import only `agentrl`."""
