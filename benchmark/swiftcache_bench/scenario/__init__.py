"""Several servers and donors at once, under loads of their own: what a scenario file describes."""
