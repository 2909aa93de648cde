"""The scheduler extender: which node, and which of its cards, every vcuda pod gets. Only the leader serves it."""
