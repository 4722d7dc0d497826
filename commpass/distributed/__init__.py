"""Agreement between ranks, state that outlives a call, and the record of what was compiled."""
