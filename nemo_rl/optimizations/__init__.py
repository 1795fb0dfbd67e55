"""Speed-ups of start-up and CPU steps that reach into other libraries; `table` lists them, `cluster.optimizations`
switches them.
"""
