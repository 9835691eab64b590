"""The JAX backend: TPU first."""
