"""The playground: a real control plane on this machine with simulated GPU nodes, this system, and busy teams.

Run as ``python -m examples.playground``, or ``make playground``. No GPU, no container and no cluster is needed.
"""
