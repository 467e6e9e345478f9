"""The donor tier: memory that processes of one machine lend to each other for KV cache.

A donor (`donor`) holds extents of memory (`extents`) and lends them to receivers (`receiver`) over
a control plane (`control`) by the rules of `lease`; a receiver cuts what it was lent into blocks
(`blocks`), some of which one that streams layers keeps for its window (`stream`). `planning` says
what models and donors come to, `cluster` starts them, `cli` is the command. Nothing here knows
about SGLang.
"""
