"""The donor tier: memory that processes of one machine lend to each other for KV cache.

A donor (`donor`) holds extents of memory (`extents`) and lends them to receivers (`receiver`) over
a control plane (`control`) by the rules of `lease`; a receiver cuts what it was lent into blocks
(`blocks`). Nothing here knows about SGLang.
"""
