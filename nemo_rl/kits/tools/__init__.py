"""Tools that a model calls between its turns.

    environment     the environment `tools`: finds calls in a response, makes them, grades the answer without a call
    schema          a function's schema and checked arguments, from its type hints and docstring
    sources         where tools come from: functions and classes here, in processes of their own, MCP servers
    parsing/        from text to calls, with the parsers of vLLM, checked against the chat template

This file imports nothing, so that a process of an isolated tool starts without torch and ray.
"""
