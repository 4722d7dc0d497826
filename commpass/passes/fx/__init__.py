"""Reading a graph: its collectives whatever their form, metadata, marks, directions."""
