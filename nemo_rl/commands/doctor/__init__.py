"""Implement `nemo_rl doctor`, which finds problems of this machine, cluster or configuration before a run starts.

    command     command line: configuration, cluster, nodes, run, report
    nodes       checks of one machine (versions, GPUs, shared memory, ports ...), here or on each node of a cluster
    run         checks of a configuration, most of them those that the run itself makes at its start
    runner      performs a list of checks, each with a deadline
        findings    a check and its result

Invariant: a check writes nothing and gets all its inputs as arguments; any error that it raises becomes a finding.
"""
