"""What coded operators become."""

from commpass.lowering.kernel import Form, Piece, Source, Taken, form_of, make

__all__ = ["Form", "Piece", "Source", "Taken", "form_of", "make"]
