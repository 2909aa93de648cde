"""Finds the GPU model of a node in the data that device plugins, drivers and GPU feature discovery publish."""
