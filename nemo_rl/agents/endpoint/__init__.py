"""Let agent programs sample from the policy through an HTTP endpoint, and record their tokens.

    program ── HTTP ──► endpoint ─► dialect ─► CallRequest ─► session ─► engines
       ▲                                                        └─► tree of calls ─► rows of the training batch
       └──────── answer ◄── dialect ◄── CallAnswer ◄────────────┘

`endpoint` serves HTTP, `dialects` translate the APIs that programs speak, `session` makes the calls of one sample,
`call_tree` finds the call that a request continues, and `recording` turns a finished tree into a trajectory.
"""
