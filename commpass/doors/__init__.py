"""Doors to other compile stacks: what they need beyond ``commpass.rewrite``, a stack a file."""
