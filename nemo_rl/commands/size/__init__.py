"""Propose parallel sizes, microbatches and memory shares of a run for given machines: `nemo_rl size`.

`machines` describes GPUs, and `jobs` the models. `candidates` lists possible sizes, `costs` and `engines` estimate
their seconds, `search` finds the fastest that fit, and `proposal` joins the results. `reasons` explains a proposal,
`report` writes it.
"""
