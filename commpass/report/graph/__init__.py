"""Drawings of the graphs of a dump: one box a site (``sites``), or one a node (``nodes``), as text,
Graphviz source or SVG. Needs no torch."""
