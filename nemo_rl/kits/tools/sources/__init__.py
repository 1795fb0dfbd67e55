"""Sources of tools, one file each: this process, a process of their own, an MCP server."""
