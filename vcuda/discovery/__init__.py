"""The GPU model of a node, found in what device plugins, drivers and GPU feature discovery publish of its cards."""
