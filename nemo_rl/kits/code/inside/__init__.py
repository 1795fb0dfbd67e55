"""Programs that run inside the sandbox. The library reads these files as source code, and never imports them.

`solution` and `checks` are the two programs that grade a solution. Each has a `peer`, which sends the requests of
`offers` and shares the containers of `heap`; `counting` counts the checks. `session` runs blocks of code. `values`
encodes the values that programs exchange.
"""
