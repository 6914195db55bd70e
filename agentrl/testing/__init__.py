"""Public fakes and contract checks, for tests of agentrl and of its plug-ins."""
