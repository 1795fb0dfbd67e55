"""Speed-ups of start-up and CPU steps that reach into other libraries, listed in `table` and switched by
`cluster.optimizations`.
"""
