"""The environment `agent`: programs that call the model themselves, and whose end is the end of their sample.

    environment ─► task ─► callables   a Python function, in the process of the environment
                           commands    a process, without a sandbox or in one (`sandboxed`)
                           service     an HTTP service elsewhere
                           └─► result: reward, answer, metrics

A program gets the address of the run's endpoint and a key of its own (`interfaces.AgentTask`). What it returns is read
by `results` in the same way whatever started it.
"""
