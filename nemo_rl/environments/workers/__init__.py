"""The processes of environments: how many, what they may use, and which episode each plays."""
