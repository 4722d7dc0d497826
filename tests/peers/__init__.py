"""PyTorch's own tests of collectives and compilers, run with commpass: ``make peers``.

``wrap.py``       what makes ``torch.compile`` use commpass, in every process of a test
``outcomes.py``   what each test gave, and why a result differs
``__main__.py``   runs files plain and with each policy, and prints what passes plain alone
"""
