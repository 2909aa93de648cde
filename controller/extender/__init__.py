"""The scheduler extender, which chooses the node and the cards of each vcuda pod. Only the leader serves it."""
