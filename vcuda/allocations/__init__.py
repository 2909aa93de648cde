"""What schedulers and device plugins write on pods and nodes, and which cards that takes."""
