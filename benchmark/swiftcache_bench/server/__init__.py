"""The servers that are measured: asked, started, told apart, ended."""
