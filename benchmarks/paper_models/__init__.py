"""Model the set-ups of four papers with commpass's cost model, one file each."""
