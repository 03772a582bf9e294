"""Tiny nodes for tests of the engine."""
