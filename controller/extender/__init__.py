"""The scheduler extender: chooses the node and the cards (GPUs) of vcuda pods. It runs in the leading controller."""
