"""Error feedback: keep, save and load what each site has not sent yet, also for other rank counts.

A *residual* belongs to one site of one module instance, on one rank. It has the shape of the site's
tensor and the dtype of its sums. The compiled graph takes it as an input and changes it in place.
It is made when the site first runs for that instance, and is freed with the instance's parameters.

Its name in ``state_dict()`` holds all that is needed to read it back. It depends on nothing that
changes from run to run, such as the order in which code is compiled: ``commpass.v2/<first
parameter>/<function>/<site>/<op>/<world, or the first rank of the group>/<rank>of<ranks>``. The
parameter is ``-`` if no model was given to look up its name.

``api`` has the public functions, ``names`` these names, and ``residuals`` what the graphs take.
``loaded`` is state that no site has taken yet. ``checks`` refuses state before it is loaded,
``redistribute`` gives it to another number of ranks, ``checkpoint`` lists that of a checkpoint, and
``unused`` warns of what is never sent.
"""

from commpass.distributed.state.api import load_state_dict, reset_state, state_dict

__all__ = ["load_state_dict", "reset_state", "state_dict"]
