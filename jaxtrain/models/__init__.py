"""Architectures in flax NNX."""
