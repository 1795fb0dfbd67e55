"""Let agent programs sample from the policy through an HTTP endpoint, and record their tokens.

    program ── HTTP ──► endpoint ─► dialect ─► CallRequest ─► session ─► engines
       ▲                                                        └─► tree of calls ─► rows of the training batch
       └──────── answer ◄── dialect ◄── CallAnswer ◄────────────┘

`server` serves HTTP, `agents.dialects` translates the APIs that programs use, `session` makes the calls of one sample,
`call_tree` finds the call that a request continues, and `player` turns a finished tree into a trajectory.
"""
