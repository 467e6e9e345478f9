"""What a set of models and donors comes to, before any of it is started."""
