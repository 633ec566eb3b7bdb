"""A training system's own functions, on a drawn step, against the oracle: ``verify --framework``.

One file per system lists named checks; ``step.py`` draws the step and compares. They run in a
process of their own (``launch.py``, ``__main__.py``): importing a training system may be slow, may
fail, and may end the process.
"""
