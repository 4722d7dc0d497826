"""An entropy-coded codec: blocks with larger values get more bits, in a wire of fixed size."""
