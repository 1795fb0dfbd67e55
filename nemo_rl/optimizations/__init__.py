"""Speed-ups of start-up and CPU steps that depend on internals of other libraries. They are listed in `switch` and
switched by `cluster.optimizations`.
"""
