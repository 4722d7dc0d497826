"""The codec that most codecs are, its parts, and its settings by name."""
