"""Checks of the functions of frameworks that have no driver, each against the reference.

One file per framework, named as it is, lists checks; ``drawn_step.py`` has the step, ``check.py``
compares. ``drivers/runs.py`` runs them.
"""
