"""Checks of values at the border of the algebra: masks, losses, arguments, ids, token weights.

Each function looks at one value and raises, or leaves its result in the plan's ``Faults`` for the
end of the step. All of their messages are here.
"""
