"""Read the bodies that clients send and write the answers that they read.

Invariant: nothing here needs the client's library. The messages are defined by their field numbers and types.
"""
