"""The layer stream cache: contexts longer than the device's own KV memory.

==================  ================================================================================
``flag_checks``     the flag, and what may not stand beside it
``sizes``           R and W of a server, from its flags and the memory there is
``model_layers``    what of a model must hold for streaming, checked at start
``pool``            ``StreamKVPool``: the device pool whose window all layers share
``allocator``       ``StreamAllocator``: page ids chosen on the host, regular pages first
``rows``            ``PageRows``: the pages of every request, on the host
``streamer``        ``LayerStreamer``: one layer computes, the next arrives
``movers``          what moves the pages of a plan: plain copies, or kernels on a stream
``planning``        which window pages a batch reads and writes
``tree``            ``StreamRadixCache``: nodes on window slots
``loading``         where nodes go that are read again
``homes``           giving back memory in which window pages live
``admission``       which requests may stream, and how much a step
``shortage``        what becomes of requests while donors back less of the window
``wiring``          what the hooks call
==================  ================================================================================
"""
