"""Which weight each token is trained with, measured from the gradients that arrive at the losses.

Knows no guard, no step and no reducer: the witness of what a run trains, whatever made its loss.
"""
