"""Programs that run inside the sandbox. The library reads these files as source code, and never imports them.

`solution` and `checks` grade a solution. Each has a `peer`, which sends the requests of `offers` and shares the
containers of `heap`; `counting` counts checks. `session` runs blocks of code. `values` encodes what programs exchange.
"""
