"""Where tools come from, one file each: this process, a process of their own, an MCP server."""
