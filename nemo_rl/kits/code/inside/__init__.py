"""Programs that run inside of the sandbox: files of source code, which the library reads and never imports.

`solution` and `checks` grade a solution: each has a `peer`, the requests are in `offers`, the containers in common in
`heap`, and the counts in `counting`. `session` runs blocks of code. `values` are what programs exchange.
"""
