"""Real training set-ups, as data: each is trained plain and compressed on real ranks."""
