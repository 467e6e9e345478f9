"""The donor: a process that lends memory to receivers on the same machine."""
