"""Experiments on memory and scheduling, each one real run: `octavo bench NAME`."""
