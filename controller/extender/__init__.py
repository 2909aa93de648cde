"""The scheduler extender, which runs in the leading controller. It chooses nodes and cards (GPUs) for vcuda pods."""
