"""The toolkit of all passes: what nodes are, share, cost and wait for, and how graphs change."""
