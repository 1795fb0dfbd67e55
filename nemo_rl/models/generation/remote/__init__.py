"""Use a model that runs on another server.

It gets messages over HTTP, and its tokens and weights are not known here.

"""
