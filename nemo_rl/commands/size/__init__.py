"""`nemo_rl size` proposes parallel sizes, microbatches and memory shares of a run for given machines.

`jobs` describes GPUs and models. `candidates` lists possible sizes of a model and estimates their seconds, `search`
finds the fastest sizes and engines that fit, `proposal` joins the results, and `report` explains and writes a proposal.
"""
