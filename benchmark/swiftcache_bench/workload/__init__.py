"""What is sent: conversations of turns, generated from a seed or read from a data set."""
