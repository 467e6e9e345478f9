"""Several servers and donors of one machine, started and ended together: `swiftcache up`."""
