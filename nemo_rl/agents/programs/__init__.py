"""The environment `agent`, whose programs call the model themselves. A sample ends when its program ends.

    environment ─► task ─► callables   a Python function, in the process of the environment
                           commands    a process, without a sandbox or in one (`sandboxed`)
                           service     an HTTP service elsewhere
                           └─► result: reward, answer, metrics

A program gets the address of the run's endpoint and its own key (`interfaces.AgentTask`). `interfaces.read_result`
reads the returned value of each kind of program in the same way.
"""
