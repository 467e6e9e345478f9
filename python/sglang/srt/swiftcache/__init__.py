"""SwiftCache inside SGLang: radix-prefix KV kept in memory that other processes lend.

Everything that touches SGLang lives in this package and nothing else does. It is laid over the
installed ``sglang`` package and overwrites no file of it.

==========================  =====================================================================
``early``                   entry point that runs inside ``import sglang``, in every process
``cpu_engine``              what the CPU engine needs on a machine without a CUDA driver
``server_flags``            the ``--swiftcache-*`` flags, as real ``ServerArgs`` fields
``flag_checks``             what may not stand beside ``--swiftcache-donors``
``donate_checks``           what ``--swiftcache-donate`` asks of the other flags
``conflicts``               a flag of SGLang's that cannot stand beside one of ours
``flag_words``              ``off`` and ``auto``, in whatever form a flag's value comes
``model_check``             model families that are not covered
``plugin``                  entry point of SGLang's plugin framework: hooks and cache backend
``hooks``                   the one list of hooks on SGLang, each with its reason
``tier_wiring``             what the hooks of the tier call
``donation_wiring``         what the hooks of lending call
``pool_wiring``             which KV pool and allocator a server gets
``admission_wiring``        who has a say in which requests are admitted
``startup_check``           the server does not start unless every hook took
``donor_kv_cache``          ``DonorKVCache``: the host pool whose slots are donor blocks
``paths``                   kernels or copy engines, operation by operation
``loads``                   which forwards a load comes after
``stores``                  what the tree wants stored, begun step by step
``cold_copies``             which copies a tier smaller than the device pool keeps
``donor_radix_cache``       ``DonorRadixCache``: the radix tree over device and donors
``vacate``                  giving memory back: move, forget or drop the blocks in it
``one_line_exit``           ending a process on an error of the user's
``refill``                  ``--swiftcache-replicas``: copies that a lost donor took are made again
``layer_stream``            contexts longer than the device's own KV memory, a package
``verify``                  ``--swiftcache-verify``: checksums of blocks, corrupt ones are misses
``expiry``                  ``--swiftcache-ttl``: forgetting what nobody has used for so long
``watchdog``                notices that nothing moves, and logs how everything stands
``audit``                   all books, checked every hour
``state_dump``              queues, pins, leases, streams, and which invariant does not hold
``tier_stats``              what ``/server_info`` reports
``traffic``                 bytes by link and by donor, and how long loads took
``tier_metrics``            what ``/metrics`` says of the tier
``donation_metrics``        what ``/metrics`` says of a server that lends its own KV memory
``ttft``                    time to first token in ``/metrics``, the server's warm-up left aside
``elastic_pool``            ``ElasticKVPool``: the page-major pool on memory that can be lent
``elastic_allocator``       ``ElasticAllocator``: lent pages are held, not free and not in use
``donation``                ``Donation``: when a server lends, takes back, waits for its memory
``succession``              what a killed server of the same name left, and what this one leaves
``request_needs``           what waiting and running requests may yet take of the pool
``aborting``                ending a request that waits for memory which does not come
``cold_prefixes``           what nobody has asked for lately, counted and evicted
``compaction``              emptying extents: cold leaves are evicted, pages moved
``forward_fence``           work that comes after every forward in flight
``page_major_paths``        moving blocks between donors and a page-major pool
==========================  =====================================================================
"""

SGLANG_VERSION = "0.5.17"
BACKEND_NAME = "swiftcache"
EXIT_BAD_INPUT = 2
