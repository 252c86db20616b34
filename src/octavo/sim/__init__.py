"""Simulation of an engine on a device that is not here: `octavo simulate`."""
