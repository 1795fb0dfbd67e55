"""Tools that a model calls between its turns.

    environment    the environment `tools`: makes the calls of a response, and grades a response without calls
    interfaces     a tool's schema and its checked arguments, from type hints and the docstring
    toolbox        all tools of an environment, from functions and classes (`local`, each in a process of its own:
                   `isolated`), programs in a sandbox (`sandboxed`) and MCP servers (`mcp`)
    vllm           reads calls with the parsers of vLLM, which `template` checks against the chat template

This file imports nothing, so that the process of an isolated tool starts without torch and ray.
"""
