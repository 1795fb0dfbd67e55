"""The processes of environments, and the clients with which rollouts call environments.

    rollouts ─► client: batches, deadlines ─► actor: hosts one environment ─► the user's class, found by `loading`
                  └► supervision: starts the actor again after a hang or a death

`start` starts the actors of an environment and divides episodes among them, and `process_guard` limits the memory and
the output of each actor.
"""
