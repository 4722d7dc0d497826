"""Draw the graphs of a dump as text, Graphviz source or SVG, without torch.

A graph has one box for each site (``sites``) or for each node (``nodes``).
"""
