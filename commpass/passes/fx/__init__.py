"""Analysis of fx graphs: collectives in every form, metadata, marks, directions."""
