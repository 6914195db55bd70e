"""agentrl: train tool-using agents with GRPO."""
