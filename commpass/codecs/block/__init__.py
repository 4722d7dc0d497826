"""``BlockCodec``, its parts (transforms, scales, grids, layouts, packing), and its presets."""
