"""The set-ups of four papers in the terms of commpass's own cost model, one file each."""
