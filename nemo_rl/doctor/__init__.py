"""`nemo_rl doctor`: what keeps a run from working on this machine or cluster, found before it starts.

    command     command line: configuration, cluster, nodes, run, report
    nodes       checks of one machine (versions, GPUs, shared memory, ports ...), here or on each node of a cluster
    run         checks of a configuration, most of them those that the run itself makes at its start
    runner      performs a list of checks, each with a deadline
    findings    what a check is and what it says

Invariant: a check writes nothing and is told everything it looks at; whatever it raises is a finding.
"""
