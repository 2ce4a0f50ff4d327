"""CPR, classifier-projection regularisation (Cha et al. 2021): stay unsure, which widens the minimum.

    l_seg + beta KL(p || uniform)        p the predicted probabilities, the mean over pixels

From the paper: the term, added to the loss of every task for whatever method is used against forgetting. Our
choices: on a pixel it goes over all classes known by then, background included; it is part of l_seg, so a
phase that flips l_seg flips it too; `method.entropy` is beta, and 0 leaves it out.
"""

from methods.losses.plain import confidence

__all__ = ["confidence"]
