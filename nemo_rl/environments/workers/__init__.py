"""The processes of environments, and how rollouts call them.

    rollouts ─► client: batches, deadlines ─► actor: hosts one environment ─► the user's class, found by `loading`
                  └► supervision: starts the actor again after a hang or a death

`start` starts the actors of an environment, `pool` divides episodes among several of them, and `process_guard` bounds
what each may use.
"""
