"""What coded operators become."""

from commpass.lowering.kernel import Source, form_of, make

__all__ = ["Source", "form_of", "make"]
