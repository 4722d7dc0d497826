"""Real training set-ups, as data: each is trained without and with compression on real ranks."""
