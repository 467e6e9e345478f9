"""Contexts longer than the device's own KV memory: the sizes of the regular and streamed parts."""
