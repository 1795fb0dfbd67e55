"""Programs that run inside of the sandbox: files of source code, which the library reads and never imports.

`solution` and `checks` grade a solution, `session` runs blocks of code, and `values` is what they exchange.
"""
