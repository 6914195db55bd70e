"""Sampling by vLLM: in this process beside the learner, or on servers of its own."""
