"""Measurements: the same work for Octavo and for other engines. Not part of the package."""
