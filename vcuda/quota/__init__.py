"""Quota documents: what namespaces may use of each GPU model, and what pods are charged."""
