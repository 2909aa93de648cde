"""Quota documents: the limits of namespaces for each GPU model, and the charges of pods."""
