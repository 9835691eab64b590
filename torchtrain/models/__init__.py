"""Architectures in PyTorch."""
