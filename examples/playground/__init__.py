"""The playground: a Kubernetes control plane on this machine with simulated GPU nodes, vcuda quota, and busy teams.

The command is ``python -m examples.playground`` or ``make playground``. It needs no GPU, no containers and no cluster.
"""
