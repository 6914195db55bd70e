"""Turns groups into gradients; knows nothing of engines."""
