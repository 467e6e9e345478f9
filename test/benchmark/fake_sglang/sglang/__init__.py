"""Stands in for SGLang: its launcher is the fake server, with the same command line."""
